"""`lorafleet adapters push`: an adapter of a local folder."""

from pathlib import Path

from tests.lorafleet.cli.conftest import Run


def test_a_push_of_other_bytes_than_the_digest_is_not_to_be_repeated(run: Run, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    where = ("--orchestrator-url", "http://127.0.0.1:1")
    for words in (("x/v1", "--digest", "0" * 64), ("x/\udcff",)):
        result = run(*where, "adapters", "push", str(tmp_path), *words)
        assert result.status == 1
        assert "repeat the command" not in result.err
        assert len(result.err.splitlines()) == 1
