"""`lorafleet keys`: keys are made, listed, revoked and rotated."""

import json
import time
from pathlib import Path

import pytest
import yaml

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from lorafleet.service.http import HttpError
from tests.lorafleet.cli.conftest import Run


def test_a_new_key_is_printed_once_and_the_file_holds_only_its_hash(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "keys.yaml"
    first = run("keys", "new", "--tenant", "acme", "--scopes", "infer", "--file", str(path)).out.strip()
    second = run("keys", "new", "--scopes", "infer, admin", "--file", str(path)).out.strip()
    text = path.read_text()
    assert first not in text
    assert [entry["sha256"] for entry in yaml.safe_load(text)["keys"]] == [hash_key(first), hash_key(second)]
    keys = ApiKeys([path])
    assert keys.caller(f"Bearer {first}").tenant == "acme"
    assert not keys.caller(f"Bearer {first}").may("admin")
    assert keys.caller(f"Bearer {second}").may("admin")
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_not_a_key_file_is_not_changed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("shopping: [milk]\n")
    result = run("keys", "new", "--file", str(path))
    assert result.status == 1
    assert path.read_text() == "shopping: [milk]\n"
    assert run("keys", "new", "--scopes", "root", "--file", str(tmp_path / "k")).status == 2
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize(
    ("scopes", "instead"),
    [
        ("admin", "tenant-admin"),
        ("infer,admin", "tenant-admin"),
        ("view,operate", "tenant-admin"),
        ("infer,load", "infer"),
        ("drain", "tenant-admin"),
        ("metrics", "tenant-admin"),
    ],
)
def test_a_tenants_key_gets_no_fleet_wide_scope(run: Run, tmp_path: Path, scopes: str, instead: str) -> None:
    path = tmp_path / "keys.yaml"
    result = run("keys", "new", "--tenant", "acme", "--scopes", scopes, "--file", str(path))
    assert result.status == 2
    assert f"--tenant acme --scopes {instead}, for a key of the tenant" in result.err
    assert f"--scopes {scopes} without --tenant" in result.err
    assert not path.exists()
    for words in (("--tenant", "acme", "--scopes", instead), ("--scopes", scopes)):
        assert run("keys", "new", *words, "--file", str(path)).status == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", ["keys", "new", "--file", "FILE"]),
        (b"[" * 100_000, ["import", "FILE", "--yes"]),
        (b"[" * 100_000, ["explain", "--replay", "FILE"]),
        (b"", ["plan", "--more-workers", "²"]),
    ],
)
def test_a_file_or_number_that_is_none_is_one_line(run: Run, tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    result = run("--router-url", "http://127.0.0.1:1", *(str(file) if word == "FILE" else word for word in words))
    assert result.status in {1, 2}
    assert len(result.err.splitlines()) == 1
    assert file.read_bytes() == content


@pytest.mark.parametrize("flag", ["--tenant", "--namespace", "--lora-ids"])
@pytest.mark.parametrize("empty", ["", " "])
def test_a_restriction_of_a_key_without_its_value_makes_no_key(run: Run, tmp_path: Path, flag: str, empty: str) -> None:
    path = tmp_path / "keys.yaml"
    result = run("keys", "new", "--scopes", "view,register", flag, empty, "--file", str(path))
    assert (result.status, result.out) == (2, "")
    assert f"{flag}: expected" in result.err
    assert len(result.err.splitlines()) == 1
    assert not path.exists()


def test_a_tenants_administrator_needs_a_tenant(run: Run, tmp_path: Path) -> None:
    result = run("keys", "new", "--scopes", "tenant-admin", "--file", str(tmp_path / "keys.yaml"))
    assert result.status == 2
    assert "needs a tenant" in result.err


def ids_of(run: Run, path: Path) -> list[str]:
    return [item["key_id"] for item in json.loads(run("keys", "list", "--json", "--file", str(path)).out)["data"]]


def test_keys_are_listed_without_key_or_hash_and_revoked_by_their_id(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("# ours\nkeys: []\n")
    words = ("--tenant", "acme", "--scopes", "infer,view", "--expires", "90d", "--note", "CI")
    first = run("keys", "new", *words, "--tokens-per-minute", "9000", "--file", str(path)).out.strip()
    second = run("keys", "new", "--scopes", "operate", "--file", str(path)).out.strip()
    listed = run("keys", "list", "--file", str(path)).out
    for shown in ("acme", "infer, view", "CI", "tokens_per_minute 9000", "all tenants", "operate", "never"):
        assert shown in listed
    for hidden in (first, second, hash_key(first), hash_key(second)):
        assert hidden not in listed
    assert run("keys", "revoke", "no", "--file", str(path)).status == 1
    gone = run("keys", "revoke", hash_key(first)[:6], "--file", str(path))
    assert hash_key(first)[:12] in gone.out
    assert ids_of(run, path) == [hash_key(second)[:12]]
    assert path.read_text().startswith("# ours\n")
    unknown = run("keys", "revoke", hash_key(first)[:12], "--file", str(path))
    assert unknown.status == 1
    assert hash_key(second)[:12] in unknown.err


def test_a_rotated_key_and_its_successor_are_both_valid_for_the_grace_time(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    words = ("--tenant", "acme", "--scopes", "tenant-admin", "--requests-per-minute", "60")
    old = run("keys", "new", *words, "--file", str(path)).out.strip()
    rotated = run("keys", "rotate", hash_key(old)[:12], "--grace", "1h", "--file", str(path))
    new, now = rotated.out.strip(), time.time()
    assert "the old key is valid until" in rotated.err
    at = now
    keys = ApiKeys([path], wall=lambda: at)
    before, after = keys.caller(f"Bearer {old}"), keys.caller(f"Bearer {new}")
    assert (before.tenant, before.scopes, before.limits) == (after.tenant, after.scopes, after.limits)
    assert after.expires_at is None
    at = now + 3601
    assert keys.caller(f"Bearer {new}")
    with pytest.raises(HttpError, match="expired") as refused:
        keys.caller(f"Bearer {old}")
    assert (refused.value.status, refused.value.code) == (401, "expired_api_key")


@pytest.mark.parametrize(
    "expires", ["90", "1y", "2020-01-01T00:00:00Z", "tomorrow", "99999999d", "1000000w", "9999-12-31T23:00:00-05:00"]
)
def test_an_expiry_that_is_none_or_past_is_refused(run: Run, tmp_path: Path, expires: str) -> None:
    result = run("keys", "new", "--expires", expires, "--file", str(tmp_path / "keys.yaml"))
    assert result.status == 2
    assert f"--expires {expires}" in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["history", "--since", "1000000w"], "--since 1000000w: must be at most 36500d"),
        (["history", "--until", "99999999h"], "--until 99999999h: expected a number"),
        (["keys", "rotate", "abcd", "--file", "k", "--grace", "1000000w"], "--grace 1000000w: must be at most 36500d"),
    ],
)
def test_a_duration_beyond_the_calendar_is_one_line(run: Run, words: list[str], says: str) -> None:
    result = run("--orchestrator-url", "http://127.0.0.1:1", *words)
    assert result.status == 2
    assert says in result.err
    assert len(result.err.splitlines()) == 1


def test_a_new_key_has_the_budgets_that_its_flags_name(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    words = ["keys", "new", "--tenant", "acme", "--file", str(path), "--tokens-per-month", "1000"]
    assert run(*words, "--soft-tokens-per-month", "800", "--engine-seconds-per-day", "60").status == 0
    limits = {"tokens_per_month": 1000, "soft_tokens_per_month": 800, "engine_seconds_per_day": 60}
    assert yaml.safe_load(path.read_text())["keys"][0]["limits"] == limits
    listed = run("keys", "list", "--file", str(path)).out
    assert "tokens_per_month 1000" in listed
    refused = run(*words, "--soft-tokens-per-month", "1001")
    assert refused.status == 2
    assert "soft_tokens_per_month must be at most tokens_per_month (1000)" in refused.err
