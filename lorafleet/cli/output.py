"""Output of lists and items: flags and formats. Columns are in `columns`, tables in `tables`."""

# ruff: noqa: PLC0415  (rich tables and YAML are imported when a command needs them)

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from lorafleet.cli.columns import Item, ListView
from lorafleet.cli.context import print_json
from lorafleet.service.failure import CommandFailed, printable

ListAnswer = Mapping[str, Any]
"""A whole REST answer: its items in `data`, and who did not answer in `missing`."""


class OutputFormat(StrEnum):
    table = "table"
    wide = "wide"
    name = "name"
    json = "json"
    yaml = "yaml"


Output = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="wide: more columns; name: names alone; json, yaml: everything"),
]
AsJson = Annotated[bool, typer.Option("--json", help="the same as -o json")]


def chosen_format(output: OutputFormat, as_json: bool) -> OutputFormat:
    """The format that both flags name. Raises CommandFailed if they contradict each other."""
    if not as_json or output is OutputFormat.json:
        return output
    if output is not OutputFormat.table:
        raise CommandFailed(f"--json and -o {output.value} contradict each other: name one", status=2)
    return OutputFormat.json


def print_list(view: ListView, answer: ListAnswer | Sequence[Item], output: OutputFormat, as_json: bool) -> None:
    """Print a list: its table, its names one a line, or all of it as JSON or YAML.

    answer  the items, or a whole answer with them in `data`, which JSON and YAML then print as it came

    Raises CommandFailed if the flags contradict each other.
    """
    whole = answer if isinstance(answer, Mapping) else {"data": answer}
    match chosen_format(output, as_json):
        case OutputFormat.name:
            for item in whole["data"]:
                typer.echo("\t".join(map(printable, view.names_of(item))))
        case OutputFormat.json | OutputFormat.yaml as chosen:
            print_value(whole, chosen)
        case chosen:
            print_table(view, whole["data"], wide=chosen is OutputFormat.wide)
            if missing := whole.get("missing"):
                names = ", ".join(map(str, missing))
                typer.echo(f"incomplete: {view.part} {names} did not answer in time", err=True)


def print_table(view: ListView, items: Sequence[Item], *, wide: bool = False) -> None:
    """Print the table of some items."""
    from lorafleet.cli import tables

    tables.show(tables.listing(view, items, wide=wide))


def print_item(item: Item, name: str, output: OutputFormat, as_json: bool) -> None:
    """Print one item: its fields as a table, its name, or all of it as JSON or YAML. Raises as `print_list`."""
    match chosen_format(output, as_json):
        case OutputFormat.name:
            typer.echo(printable(name))
        case OutputFormat.json | OutputFormat.yaml as chosen:
            print_value(item, chosen)
        case _:
            print_fields(item)


def print_fields(item: Item) -> None:
    """Print an item's fields as a table."""
    from lorafleet.cli import tables

    tables.show(tables.fields(item))


def print_value(value: Any, chosen: OutputFormat) -> None:
    """Print a value as YAML, or else as JSON."""
    if chosen is not OutputFormat.yaml:
        print_json(value)
        return
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes the objects of an answer as the dicts that they are."""

    Dumper.add_multi_representer(dict, Dumper.represent_dict)
    typer.echo(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120), nl=False)
