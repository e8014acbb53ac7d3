"""A key file that `lorafleet keys` edits stays where services read it, and stays theirs."""

import os
from pathlib import Path

import pytest

from lorafleet.cli.keys import add_key, revoke_key
from lorafleet.service.auth import ApiKeys
from lorafleet.service.http import HttpError
from lorafleet.service.key_files import hash_key


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
