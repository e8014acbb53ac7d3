"""A key file's text with one entry added, removed or given an expiry. Comments and the other entries stay as they are.

Pure. The YAML parser's marks say where an entry stands. The result is parsed again, so an edit that went wrong raises.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

Entry = Mapping[str, Any]


class KeyTextError(ValueError):
    """The text has a form that cannot be edited in place, as one with anchors."""


def with_entry(text: str, entry: Entry) -> str:
    """The text with this entry as the last one. Raises KeyTextError."""

    def edited() -> str:
        """The edited text."""
        entries = _key_list_node(text)
        if entries is None:
            return f"{text.rstrip()}\nkeys:\n{_block_style_entry(entry, 0)}".lstrip("\n")
        if not entries.value:
            start, end = _node_span(entries)
            return f"{text[:start].rstrip()}\n{_block_style_entry(entry, 0)}{text[end:].lstrip(' ')}"
        _, end = _node_span(entries.value[-1])
        if entries.flow_style:
            return f"{text[:end]}, {_flow_style_entry(entry)}{text[end:]}"
        end = _line_end(text, end)
        return f"{text[:end].rstrip(chr(10))}\n{_block_style_entry(entry, entries.start_mark.column)}{text[end:]}"

    return _checked_edit(text, edited, lambda entries: [*entries, dict(entry)])


def without_entry(text: str, index: int) -> str:
    """The text without the entry at this index. Raises KeyTextError."""

    def edited() -> str:
        """The edited text."""
        entries = _key_list_node(text)
        assert entries is not None, "an index of an entry"
        start, end = _node_span(entries.value[index])
        if entries.flow_style:
            if index + 1 < len(entries.value):
                end = _node_span(entries.value[index + 1])[0]
            elif index:
                start = _node_span(entries.value[index - 1])[1]
            return text[:start] + text[end:]
        if len(entries.value) == 1:
            colon = text.index(":", _keys_end(text))
            before = text[colon + 1 : text.rindex("\n", 0, start) + 1]
            return f"{text[: colon + 1]} []{before}{text[_line_end(text, end) :]}"
        return text[: text.rindex("\n", 0, start) + 1] + text[_line_end(text, end) :]

    return _checked_edit(text, edited, lambda entries: entries[:index] + entries[index + 1 :])


def with_expiry(text: str, index: int, expires: str) -> str:
    """The text with this expiry, a UTC time, in the entry at this index. Raises KeyTextError."""

    def edited() -> str:
        """The edited text."""
        entries = _key_list_node(text)
        assert entries is not None, "an index of an entry"
        node = entries.value[index]
        for key, value in node.value:
            if key.value == "expires":
                return text[: value.start_mark.index] + expires + text[value.end_mark.index :]
        _, end = _node_span(node)
        if node.flow_style:
            return f"{text[: end - 1].rstrip()}, expires: {expires}{text[end - 1 :]}"
        end = _line_end(text, end)
        indent = " " * node.value[0][0].start_mark.column
        return f"{text[:end].rstrip(chr(10))}\n{indent}expires: {expires}\n{text[end:]}"

    at = yaml.safe_load(expires)
    return _checked_edit(
        text, edited, lambda entries: [*entries[:index], entries[index] | {"expires": at}, *entries[index + 1 :]]
    )


def _checked_edit(text: str, edited: Callable[[], str], expected: Callable[[list[dict[str, Any]]], object]) -> str:
    """The edited text, once it is known to say what is expected. Raises KeyTextError."""
    before = yaml.safe_load(text) or {}
    try:
        after = edited()
        entries = yaml.safe_load(after)["keys"]
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as exc:
        raise KeyTextError(f"this form of YAML cannot be edited in place ({exc})") from exc
    if entries != expected(before.get("keys") or []):
        raise KeyTextError("this form of YAML cannot be edited in place; write one entry a line, `- {sha256: ...}`")
    return after


def _key_list_node(text: str) -> yaml.SequenceNode | None:
    """The node of the list of keys; None in a text without one."""
    return next((value for _, value in _key_list_fields(text) if isinstance(value, yaml.SequenceNode)), None)


def _keys_end(text: str) -> int:
    """The offset behind the word `keys`."""
    return next(int(key.end_mark.index) for key, _ in _key_list_fields(text))


def _key_list_fields(text: str) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """(key, value) of the document's field `keys`."""
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in document.value if isinstance(document, yaml.MappingNode) else ():
        if key.value == "keys":
            yield key, value


def _node_span(node: yaml.Node) -> tuple[int, int]:
    """First and last offset of a node's text, without the blanks and comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        return node.start_mark.index, max(_node_span(leaf)[1] for leaf in _direct_nodes(node))
    return node.start_mark.index, node.end_mark.index


def _direct_nodes(node: yaml.CollectionNode) -> Iterator[yaml.Node]:
    """The nodes directly in a collection, a mapping's keys and values alike."""
    for each in node.value:
        yield from each if isinstance(each, tuple) else (each,)


def _line_end(text: str, offset: int) -> int:
    """The offset behind the line that this offset is in, or behind the text."""
    if text[:offset].endswith("\n"):
        return offset
    found = text.find("\n", offset)
    return len(text) if found < 0 else found + 1


def _block_style_entry(entry: Entry, indent: int) -> str:
    """An entry as an item of a block list, indented."""
    lines = yaml.safe_dump([dict(entry)], sort_keys=False).splitlines()
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def _flow_style_entry(entry: Entry) -> str:
    """An entry in braces, on one line."""
    return yaml.safe_dump(dict(entry), sort_keys=False, default_flow_style=True, width=10_000).strip()
