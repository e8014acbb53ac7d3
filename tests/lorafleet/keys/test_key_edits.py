"""A key file that `lorafleet keys` edits stays where services read it, and stays theirs."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_edits import add_key, revoke_key, rotate_key
from lorafleet.keys.key_files import FIRST_LINE, LAST_LINE, hash_key, read_key_file
from lorafleet.service.failure import CommandFailed
from lorafleet.service.http import HttpError


def test_a_key_that_is_revoked_through_a_link_is_revoked_in_the_file_that_it_names(tmp_path: Path) -> None:
    target, link = tmp_path / "secrets" / "keys.yaml", tmp_path / "keys.yaml"
    key = add_key(target, None, ["admin"])
    target.chmod(0o640)
    link.symlink_to(target)
    other = add_key(link, "acme", ["infer"])
    revoke_key(link, hash_key(key)[:12])
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    keys = ApiKeys([target])
    assert keys.caller(f"Bearer {other}").tenant == "acme"
    with pytest.raises(HttpError):
        keys.caller(f"Bearer {key}")


def test_a_link_to_a_file_that_is_missing_makes_the_file(tmp_path: Path) -> None:
    link = tmp_path / "keys.yaml"
    link.symlink_to("new.yaml")
    key = add_key(link, None, ["infer"])
    assert ApiKeys([tmp_path / "new.yaml"]).caller(f"Bearer {key}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_key_file_stays_its_services_when_root_edits_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, None, ["infer"])
    os.chown(path, 12345, 23456)
    add_key(path, None, ["infer"])
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 23456, 0o600)


def test_a_new_key_file_has_the_marks_by_which_a_cut_is_seen_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = [add_key(path, "acme", ["infer"]) for _ in range(3)]
    revoke_key(path, hash_key(keys[2])[:12])
    rotate_key(path, hash_key(keys[0])[:12], grace=timedelta(hours=1), now=datetime.now(UTC))
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == (FIRST_LINE, LAST_LINE)
    assert read_key_file(path).is_marked
    for key in keys[:2]:
        revoke_key(path, hash_key(key)[:12])
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(CommandFailed, match="cut off"):
        add_key(path, "acme", ["infer"])


def test_a_file_that_a_person_wrote_stays_without_marks(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: []\n")
    add_key(path, "acme", ["infer"])
    assert not read_key_file(path).is_marked


def test_a_file_with_issuers_alone_takes_keys_and_keeps_its_issuers(tmp_path):
    path = tmp_path / "keys.yaml"
    issuer = "{issuer: https://a.example, audiences: [x], grants: [{claims: {g: a}, scopes: [view]}]}"
    path.write_text(f"issuers:\n- {issuer}\n")
    with pytest.raises(CommandFailed, match="no key of this file has that id"):
        revoke_key(path, "0123abcd")
    key = add_key(path, None, ["infer"])
    found = read_key_file(path)
    assert set(found.callers) == {hash_key(key)}
    assert set(found.issuers) == {"https://a.example"}
    revoke_key(path, hash_key(key)[:12])
    assert set(read_key_file(path).issuers) == {"https://a.example"}
