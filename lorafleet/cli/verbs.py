"""The commands that every resource has: list, show, act on one item, change one, wait for one.

`resources` has the name, the route and the columns of each resource.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from lorafleet.cli.columns import Item, ListView
from lorafleet.cli.context import if_match_header, names_of
from lorafleet.cli.output import AsJson, Output, OutputFormat, chosen_format, print_fields, print_item, print_list
from lorafleet.service.network.urls import url_path

if TYPE_CHECKING:
    from lorafleet.cli.client import RestClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that is done with one item, by one call.

    words  the command
    help   what it does, in a sentence
    path   of the call, behind the item's own
    says   the line that is printed then: a text with `{name}`, or a function of the answer
    """

    words: str
    help: str
    says: str | Callable[[Item], str]
    method: str = "POST"
    path: str = ""
    body: Mapping[str, Any] | None = None


NO_COLUMNS = ListView(())


def _spec_of(item: Item) -> Item:
    """What was written of an item; the item itself where it is all that."""
    spec: Item = item.get("spec", item)
    return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of thing that the orchestrator has, and its commands.

    command  the group of its commands
    about    the help of the group
    route    of the list; a `{}` in it is the name of the item, else the name follows it
    metavar  a name in the help: `LORA_ID`
    example  a name, for examples
    list_help, show_help  of `list` and `show`; empty: there is no such command
    written  the part of an item that `set` changed and prints
    story    lines for people that `show` prints in place of the fields
    actions  what is done with one of them
    """

    command: str
    about: str
    route: str
    view: ListView = NO_COLUMNS
    metavar: str = "NAME"
    example: str = ""
    list_help: str = ""
    list_example: str = ""
    show_help: str = ""
    written: Callable[[Item], Item] = _spec_of
    story: Callable[[Item], Sequence[str]] | None = None
    actions: tuple[Action, ...] = ()

    def path(self, name: str | None) -> str:
        """The REST path of the item with this name; of the only one for None. Raises CommandFailed for no name."""
        if name is None:
            return self.route
        return self.route.format(url_path(name)) if "{}" in self.route else f"{self.route}/{url_path(name)}"

    def app(self) -> typer.Typer:
        """The group of its commands."""
        app = typer.Typer(no_args_is_help=True, help=self.about)
        if self.list_help:
            _add_list(app, self)
        if self.show_help and self.example:
            _add_show(app, self)
        elif self.show_help:
            _add_show_of_the_only_one(app, self)
        for action in self.actions:
            _add_action(app, self, action)
        return app

    def argument(self) -> Any:
        """The argument that names one of them, completed with the fleet's names."""
        complete = names_of(self.route, self.view.names[0]) if self.view.names else None
        return typer.Argument(metavar=self.metavar, autocompletion=complete)


def _command_help(text: str, example: str) -> str:
    """A command's help."""
    return f"{text}\n\nExample: lorafleet {example}"


def _add_list(app: typer.Typer, resource: Resource) -> None:
    """Add `list`."""
    example = resource.list_example or f"{resource.command} list"

    @app.command("list", help=_command_help(resource.list_help, example))
    def list_items(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
        print_all(context, resource, output, as_json)


def print_all(context: typer.Context, resource: Resource, output: OutputFormat, as_json: bool) -> None:
    """Print all items of a resource."""
    with context.obj.orchestrator() as api:
        print_list(resource.view, api.list_all(resource.route), output, as_json)


def _add_show(app: typer.Typer, resource: Resource) -> None:
    """Add `show NAME`."""
    argument = resource.argument()

    @app.command("show", help=_command_help(resource.show_help, f"{resource.command} show {resource.example}"))
    def show_item(
        context: typer.Context,
        name: str = argument,
        output: Output = OutputFormat.table,
        as_json: AsJson = False,
    ) -> None:
        _print_one(context, resource, name, output, as_json)


def _add_show_of_the_only_one(app: typer.Typer, resource: Resource) -> None:
    """Add `show`, of what the fleet has one of."""

    @app.command("show", help=_command_help(resource.show_help, f"{resource.command} show"))
    def show_only(context: typer.Context, output: Output = OutputFormat.table, as_json: AsJson = False) -> None:
        _print_one(context, resource, None, output, as_json)


def _print_one(
    context: typer.Context, resource: Resource, name: str | None, output: OutputFormat, as_json: bool
) -> None:
    """Print one item, with its etag where it has one."""
    with context.obj.orchestrator() as api:
        item, etag = api.get_with_etag(resource.path(name))
    item |= {"etag": etag.strip('"')} if etag else {}
    if resource.story is not None and chosen_format(output, as_json) is OutputFormat.table:
        for line in resource.story(item):
            typer.echo(line)
    else:
        print_item(item, resource.command if name is None else name, output, as_json)


def _add_action(app: typer.Typer, resource: Resource, action: Action) -> None:
    """Add an action on one item."""
    argument = resource.argument()

    @app.command(action.words, help=_command_help(action.help, f"{resource.command} {action.words} {resource.example}"))
    def act(context: typer.Context, name: str = argument) -> None:
        with context.obj.orchestrator() as api:
            answer = api.call(action.method, resource.path(name) + action.path, action.body)
        typer.echo(action.says.format(name=name) if isinstance(action.says, str) else action.says(answer))


def change(
    context: typer.Context, resource: Resource, name: str | None, changes: Mapping[str, Any], if_match: str | None
) -> None:
    """Change fields of one item, if its etag is still `if_match`, and print what was written."""
    with context.obj.orchestrator() as api:
        item = api.call("PATCH", resource.path(name), changes, headers=if_match_header(if_match))
        print_fields(resource.written(item))


def follow(
    api: "RestClient",
    path: str,
    item: Item,
    *,
    line: Callable[[Item], str],
    is_over: Callable[[Item], bool],
    step: Callable[[Item], object] | None = None,
    every_s: float,
    passing: Sequence[int] = (),
) -> Item:
    """Wait until an item is over, print a line of each step, and return the item as it is then.

    item     as the call that began it answered; its line is printed already
    step     what makes a new line; default: another line
    passing  statuses that may be temporary
    """
    from lorafleet.cli.client import read_patiently  # noqa: PLC0415  (httpx is imported when a command needs it)

    step = step or line
    while not is_over(item):
        time.sleep(every_s)
        before, item = step(item), read_patiently(lambda: api.call("GET", path), passing=passing)
        if step(item) != before:
            typer.echo(line(item))
    return item
