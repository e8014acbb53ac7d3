"""Tables that the CLI prints: of a list's columns, and of one item's fields."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from lorafleet.cli.columns import TIME, Item, ListView, Shown
from lorafleet.service.failure import printable

_WIDE = 4000
_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)


def console() -> Console:
    """The console for tables; very wide if the output is not a terminal, so that a pipe gets whole rows."""
    table_ = Console(markup=False, highlight=False)
    if not table_.is_terminal:
        table_.width = _WIDE
    return table_


def show(renderable: RenderableType) -> None:
    """Print a table. Cells break between words only, so that names, ids and URLs can be copied.

    A table that does not fit is printed one row a line.
    """
    out = console()
    # If that does not fit, each row is one line, which the terminal wraps.
    if out.measure(renderable, options=out.options.update(width=_WIDE)).minimum > out.width:
        out.width = _WIDE
    with out.capture() as printed:
        out.print(renderable, crop=False)
    # Without trailing blanks, which a terminal would wrap, too.
    out.file.write(_TRAILING_BLANKS.sub(r"\1", printed.get()))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """A table of cells. Numbers are aligned right; numbers, times and words are not broken across lines."""
    body = [[printable(cell_text(cell)) for cell in row] for row in rows]
    table_ = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        cells = [row[index] for row in body]
        is_number = bool(body) and all(map(_is_number, cells))
        whole = cells if is_number or name == TIME else [word for cell in cells for word in cell.split()]
        least = max(map(len, [*whole, *name.split()]), default=0)
        table_.add_column(name, justify="right" if is_number else "left", overflow="fold", min_width=least)
    for row in body:
        table_.add_row(*row)
    return table_


def listing(view: ListView, items: Iterable[Item], *, wide: bool = False) -> Table:
    """A table of items, one row each, with the columns that are shown."""
    found = list(items)
    columns = [column for column in view.columns if wide or column.shown is not Shown.wide]
    cells = {column: [column.cell(item, wide=wide) for item in found] for column in columns}
    if not wide:
        columns = [
            column
            for column in columns
            if column.shown is Shown.always or any(cell is not None for cell in cells[column])
        ]
    return table([column.heading for column in columns], zip(*(cells[column] for column in columns), strict=True))


def fields(item: Item) -> Table:
    """A table of one item's fields; those of `spec` and `status` have their paths, and each object of a list a row."""
    rows: list[tuple[str, Any]] = []
    for name, value in _fields_with_paths(item):
        objects = value if isinstance(value, list) and value and isinstance(value[0], Mapping) else [value]
        rows += [(name if number == 0 else "", each) for number, each in enumerate(objects)]
    return table(["field", "value"], rows)


def _fields_with_paths(item: Item) -> Iterator[tuple[str, Any]]:
    """(name, value) of each field, with `spec.name` for what is in `spec`, and so for `status`."""
    for name, value in item.items():
        if name in ("spec", "status") and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def cell_text(cell: object) -> str:
    """A table cell as text: `-` for None, four decimals of a float, NAME=VALUE of a mapping."""
    match cell:
        case None:
            return "-"
        case float():
            return f"{cell:.4f}"
        case Mapping():
            return ", ".join(f"{name}={cell_text(value)}" for name, value in cell.items())
        case list() | tuple():
            return ", ".join(map(str, cell))
        case _:
            return str(cell)


def _is_number(text: str) -> bool:
    """Whether a cell is aligned right: digits with one point at most, `-`, or empty."""
    return text in ("-", "") or text.replace(".", "", 1).isdigit()
