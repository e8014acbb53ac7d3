"""A class name that stands twice is found, wherever the classes stand."""

from tests.tools.class_names import shared_names


def test_a_name_that_two_files_or_one_file_define_twice_is_found():
    sources = [("a.py", "class One: ...\nclass Two:\n    class Inner: ..."), ("b.py", "def f():\n    class Inner: ...")]
    assert shared_names([*sources, ("c.py", "class One: ...\nOne = 3")]) == {
        "Inner": ["a.py", "b.py"], "One": ["a.py", "c.py"],
    }  # fmt: skip
    assert shared_names(sources[:1]) == {}
