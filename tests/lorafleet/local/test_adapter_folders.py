"""`lorafleet up --adapters`: the adapters found below a folder, and notices about the rest."""

from pathlib import Path

import pytest

from lorafleet.local.adapter_folders import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    adapter_folders,
    folder_notices,
    folder_problem,
    linked_folders,
)


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_an_adapters_name_is_its_path_below_the_folder(tmp_path: Path) -> None:
    for name in ("sql/v1", "sql/v2", "plain"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "no-adapter").mkdir()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapter_folders(tmp_path) == {name: tmp_path / name for name in ("plain", "sql/v1", "sql/v2")}


def test_only_links_to_adapter_folders_are_reported(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "adapters", tmp_path / "elsewhere"
    for folder in (root / "team", elsewhere / "sql" / "v1", tmp_path / "empty"):
        folder.mkdir(parents=True)
    (elsewhere / "sql" / "v1" / "adapter_config.json").write_text("{}")
    (root / "team" / "theirs").symlink_to(elsewhere)
    (root / "v1").symlink_to(elsewhere / "sql" / "v1")
    (root / "empty").symlink_to(tmp_path / "empty")
    assert linked_folders(root) == [root / "team" / "theirs", root / "v1"]
    assert adapter_folders(root) == {}


def test_a_folder_without_adapters_gives_a_hint(tmp_path: Path) -> None:
    (line,) = folder_notices(put(tmp_path / "empty" / "deeper").parent)
    for part in (
        str(tmp_path / "empty"),
        "has no adapters",
        CONFIG_NAME,
        WEIGHTS_NAME,
        "lorafleet adapters add NAME",
    ):
        assert part in line


def test_a_folder_of_valid_adapters_gives_no_notice(tmp_path: Path) -> None:
    put(tmp_path / "sql" / "v1", CONFIG_NAME, WEIGHTS_NAME)
    assert (folder_notices(tmp_path), folder_problem(tmp_path)) == ([], "")


def test_weights_without_a_config_are_reported(tmp_path: Path) -> None:
    put(tmp_path / "good", CONFIG_NAME, WEIGHTS_NAME)
    for number in range(7):
        put(tmp_path / f"bad{number}", "adapter_model.bin" if number else WEIGHTS_NAME)
    lines = folder_notices(tmp_path)
    assert [str(tmp_path / f"bad{number}") in line for number, line in enumerate(lines)] == [True] * 5 + [False]
    assert lines[-1].startswith("2 more folders")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-00001-of-00002.safetensors", "a whole model"),
        ("pytorch_lora_weights.safetensors", "image models"),
        ("lora.safetensors", "Mistral"),
        ("sql.nemo", "NeMo"),
        ("my-style.safetensors", "a name that no engine reads"),
    ],
)
def test_folders_in_other_formats_are_reported_once_with_what_they_are(tmp_path: Path, name: str, words: str) -> None:
    put(tmp_path / "good" / "global_step10", "model.safetensors").joinpath("..", CONFIG_NAME).touch()
    put(tmp_path / "other", name)
    put(tmp_path / "other" / "text_encoder", "model.safetensors")
    put(tmp_path / "other" / "checkpoint-5", CONFIG_NAME)
    (line,) = folder_notices(tmp_path)
    assert line.startswith(f"{tmp_path / 'other'} is left out: found {name}")
    assert words in line


def test_an_adapter_in_the_root_folder_is_reported(tmp_path: Path) -> None:
    put(tmp_path, CONFIG_NAME, WEIGHTS_NAME)
    put(tmp_path / "checkpoint-100", CONFIG_NAME, WEIGHTS_NAME)
    (line,) = folder_notices(tmp_path)
    assert line.startswith(f"{tmp_path} is an adapter itself and is left out")
    assert folder_problem(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "part"),
    [("missing", "no such folder"), ("file", "is a file"), ("one", "--adapters {}, where its name is one")],
)
def test_a_wrong_adapters_folder_is_refused_with_a_hint(tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / "file").write_text("")
    put(tmp_path / "one", CONFIG_NAME, WEIGHTS_NAME)
    assert part.format(tmp_path) in folder_problem(tmp_path / name)
