"""`lorafleet chart save`: the chart of this version in a folder."""

import filecmp

import pytest
from typer.testing import CliRunner

from lorafleet.cli.main import app
from lorafleet.local.chart import chart_folder, save_chart
from lorafleet.service.failure import CommandFailed


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_saved_chart_is_the_charts_files_and_nothing_else(tmp_path):
    folder = tmp_path / "made" / "chart"
    done = CliRunner().invoke(app, ["chart", "save", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"helm install fleet {folder}" in done.output
    assert files_of(folder) == files_of(chart_folder())
    assert filecmp.cmpfiles(folder, chart_folder(), files_of(folder), shallow=False)[1:] == ([], [])


def test_another_version_of_the_chart_is_replaced(tmp_path):
    save_chart(tmp_path / "chart")
    (tmp_path / "chart" / "templates" / "gone.yaml").write_text("")
    save_chart(tmp_path / "chart")
    assert files_of(tmp_path / "chart") == files_of(chart_folder())


@pytest.mark.parametrize("name", ["notes.txt", "Chart.yaml"])
def test_a_folder_with_something_else_is_left_as_it_is(tmp_path, name):
    (tmp_path / name).write_text("name: another\n")
    with pytest.raises(CommandFailed, match="name a new folder"):
        save_chart(tmp_path)
    assert files_of(tmp_path) == [name]


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "chart").write_text("")
    with pytest.raises(CommandFailed, match="is a file; name a folder"):
        save_chart(tmp_path / "chart")
