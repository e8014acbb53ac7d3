"""Edits of a key file's text: one entry changes; comments and all other entries stay as written."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.keys.key_text import KeyTextError, with_entry, with_expiry, without_entry

NEW = {"sha256": "f" * 64, "scopes": ["infer"], "note": "new: one"}
AT = "2027-01-31T00:00:00Z"
words = st.text("abc #:{}[]'\"-é", max_size=8)
entries = st.lists(
    st.fixed_dictionaries(
        {
            "sha256": st.integers(0, 9).map(lambda n: str(n) * 64),
            "scopes": st.sampled_from(["infer", "view"]).map(lambda scope: [scope]),
        },
        optional={
            "note": words,
            "limits": st.integers(1, 9).map(lambda n: {"requests_per_minute": n}),
            "tenant": st.just("acme"),
        },
    ),
    max_size=4,
)


@st.composite
def key_texts(draw) -> tuple[str, list, list[str]]:
    """(text, entries, comments): a key file in block or flow style, with comments between its entries."""
    found = draw(entries)
    if draw(st.booleans()):
        flow = yaml.safe_dump(found, default_flow_style=True, width=draw(st.sampled_from([60, 10_000]))).strip()
        return f"# above\nkeys: {flow}  # behind\n# below\n", found, ["# above", "# behind", "# below"]
    indent, comments, lines = " " * draw(st.sampled_from([0, 2])), ["# above"], ["# above", "keys:"]
    for number, entry in enumerate(found):
        if draw(st.booleans()):
            comments.append(f"# of entry {number}")
            lines.append(f"{indent}# of entry {number}")
        lines += [indent + line for line in yaml.safe_dump([entry], sort_keys=False).splitlines()]
    if not found:
        lines[-1] += " []"
    if draw(st.booleans()):
        comments.append("# below")
        lines.append("# below")
    return "\n".join(lines) + draw(st.sampled_from(["\n", ""])), found, comments


def values(text: str) -> list:
    return yaml.safe_load(text)["keys"]


@given(key_texts())
def test_an_added_entry_is_the_last_and_all_comments_stay(drawn):
    text, found, comments = drawn
    after = with_entry(text, NEW)
    assert values(after) == [*found, NEW]
    assert all(comment in after for comment in comments)


@given(key_texts(), st.data())
def test_a_removed_entry_leaves_the_others_and_all_comments(drawn, data):
    text, found, comments = drawn
    if not found:
        return
    index = data.draw(st.integers(0, len(found) - 1))
    after = without_entry(text, index)
    assert values(after) == found[:index] + found[index + 1 :]
    assert all(comment in after for comment in comments)


@given(key_texts(), st.data())
def test_an_expiry_changes_one_entry_and_can_be_changed_again(drawn, data):
    text, found, comments = drawn
    if not found:
        return
    index = data.draw(st.integers(0, len(found) - 1))
    for at in (AT, "2026-12-01T10:00:00Z"):
        text = with_expiry(text, index, at)
        changed = found[index] | {"expires": yaml.safe_load(at)}
        assert values(text) == [*found[:index], changed, *found[index + 1 :]]
    assert all(comment in text for comment in comments)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "keys:\n", "keys: []", "keys: null\n"])
def test_an_entry_is_added_to_an_empty_file(text):
    assert values(with_entry(text, NEW)) == [NEW]


def test_a_text_with_anchors_is_left_alone():
    text = f"keys:\n- &one {{sha256: {'1' * 64}, scopes: &s [infer]}}\n- {{sha256: {'2' * 64}, scopes: *s}}\n"
    with pytest.raises(KeyTextError):
        without_entry(text, 0)
