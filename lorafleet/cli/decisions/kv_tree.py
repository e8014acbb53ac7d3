"""`lorafleet kv tree`: a router's prefix index as a tree."""

from collections.abc import Iterator
from typing import Annotated

import typer

from lorafleet.cli.columns import Item
from lorafleet.cli.context import print_json
from lorafleet.cli.resources import adapter_names
from lorafleet.service.failure import printable

kv_app = typer.Typer(no_args_is_help=True, help="What the engines' prefix caches hold, as a router knows it.")


@kv_app.callback()
def kv() -> None:
    """What the engines' prefix caches hold, as a router knows it."""


@kv_app.command("tree")
def tree(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="base model; default: the only one", show_default=False)] = "",
    adapter: Annotated[
        str, typer.Option(help="a lora_id, lora_id@digest, or base; default: all", autocompletion=adapter_names)
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="most nodes shown")] = 200,
    depth: Annotated[int, typer.Option(min=1, max=64, help="most levels shown")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="print the router's whole answer")] = False,
) -> None:
    """Show the prompts that the router sent lately as a tree, with the workers that hold each part of them now.

    A line is a run of blocks without a branch and with equal holders: where it begins, its length, its prompts.

    Examples:

      lorafleet kv tree

      lorafleet kv tree --adapter sql-expert/v1 --limit 50
    """
    with context.obj.router() as api:
        answer = api.call("GET", "/v1/kv/tree", model=model, adapter=adapter, limit=limit, depth=depth)
    if as_json:
        print_json(answer)
        return
    for line in tree_lines(answer):
        typer.echo(line)


def tree_lines(answer: Item) -> Iterator[str]:
    """The lines of an answer of `GET /v1/kv/tree`."""
    stored = ", ".join(f"{blocks} of {size} tokens" for size, blocks in sorted(answer["stored_blocks"].items()))
    prompts = _count(answer["prompts"], "prompt")
    yield printable(f"{answer['base_model']}: {prompts}; blocks in the index: {stored or 'none'}")
    for root in answer["roots"]:
        yield printable(
            f"{root['adapter']} ({_count(root['prompts'], 'prompt')}, blocks of {root['block_size']} tokens)"
        )
        yield from _lines_below(root, "")


def _lines_below(node: Item, indent: str) -> Iterator[str]:
    """A line for each node below one, and one for the branches that the answer leaves out."""
    children, more = node.get("children", ()), node.get("more", 0)
    for number, child in enumerate(children, 1):
        is_last = number == len(children) and not more
        yield indent + ("└─ " if is_last else "├─ ") + printable(_node_text(child))
        yield from _lines_below(child, indent + ("   " if is_last else "│  "))
    if more:
        yield f"{indent}└─ … {more} more"


def _node_text(node: Item) -> str:
    """A node in one line: its blocks, its prompts and who has them."""
    holders, others = ", ".join(node["holders"]), node["held_by"] - len(node["holders"])
    on = f"on {holders}{f' and {others} more' if others > 0 else ''}" if holders else "on no device"
    below = f", below the device on {', '.join(node['lower'])}" if node["lower"] else ""
    return f"{_count(node['blocks'], 'block')} from {node['depth']}: {on}{below} ({_count(node['prompts'], 'prompt')})"


def _count(number: int, noun: str) -> str:
    """A number of things, such as `1 block` and `2 blocks`."""
    return f"{number} {noun}{'s'[: number != 1]}"
