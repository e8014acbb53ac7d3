import pytest
from structlog.testing import capture_logs

from router.fleet.catalog import load_catalog


@pytest.mark.parametrize("name", ["nothing", "x" * 300, "no-folder/catalog.json", "broken"])
def test_an_unreadable_saved_catalog_is_logged_and_ignored(tmp_path, name):
    (tmp_path / "no-folder").write_text("")
    (tmp_path / "broken").write_text("{")
    with capture_logs() as said:
        assert load_catalog(tmp_path / name) is None
    assert [line["event"] for line in said] == (["saved catalog not used"] if name != "nothing" else [])
