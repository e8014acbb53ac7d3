"""The key of our own calls is the one that stands in its file now."""

import subprocess
import sys

import httpx
import pytest

from lorafleet.keys.key_files import KeyFileError
from lorafleet.keys.own_key import OwnKey
from lorafleet.local.tiny_model import make_model
from tests.patience import patience


class OwnKeyClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def put(path, text) -> None:
    """As Kubernetes changes a mounted Secret: another file, to which a link is moved."""
    new = path.parent / f"{path.name}-{len(list(path.parent.iterdir()))}"
    new.write_text(text)
    link = path.parent / "moving"
    link.symlink_to(new)
    link.replace(path)


@pytest.fixture
def file(tmp_path):
    put(tmp_path / "token", "lf-one\n")
    return tmp_path / "token"


def test_a_file_comes_before_a_fixed_key_and_is_read_again_when_it_changes(file):
    clock = OwnKeyClock()
    own = OwnKey("fixed", file, clock=clock)
    assert own.headers == {"authorization": "Bearer lf-one"}
    put(file, "lf-two")
    assert own.key == "lf-one"  # checked once a second
    clock.now += 1
    assert own.key == "lf-two"


def test_without_a_file_the_key_stays_and_without_a_key_nothing_is_sent():
    assert OwnKey("fixed").headers == {"authorization": "Bearer fixed"}
    assert OwnKey().headers == {}


@pytest.mark.parametrize("broken", ["", " \n", "two words", None])
def test_an_unreadable_file_leaves_the_last_good_key(file, broken):
    clock = OwnKeyClock()
    own = OwnKey("", file, clock=clock)
    if broken is None:
        file.unlink()
    else:
        put(file, broken)
    clock.now += 1
    assert own.key == "lf-one"
    put(file, "lf-two")
    clock.now += 1
    assert own.key == "lf-two"


@pytest.mark.parametrize(("text", "says"), [("", "is empty"), ("a b", "must be one key"), (None, "No such file")])
def test_an_invalid_token_file_at_the_start_is_named(tmp_path, text, says):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KeyFileError, match=f"token_file {path}.*{says}.*expected one key"):
        OwnKey("", path)


async def test_each_request_gets_the_current_key_unless_it_has_one(file):
    clock, seen = OwnKeyClock(), []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200)

    own = OwnKey("", file, clock=clock)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), auth=own) as client:
        await client.get("http://a/")
        put(file, "lf-two")
        clock.now += 1
        await client.get("http://a/")
        await client.get("http://a/", headers={"authorization": "Bearer theirs"})
        await client.get("http://a/", auth=None)
    assert seen == ["Bearer lf-one", "Bearer lf-two", "Bearer theirs", None]


@pytest.mark.fleet
@pytest.mark.parametrize("service", ["router", "orchestrator", "workers"])
def test_a_service_with_an_unreadable_key_ends_with_one_line(tmp_path, service):
    model = ["--model", str(make_model(tmp_path / "model"))] if service == "workers" else []
    flags = ["--token-file", str(tmp_path / "none"), "--engine", "sim"][: 4 if model else 2]
    state = {"workers": "--state-dir", "orchestrator": "--store"}.get(service)
    flags += [state, str(tmp_path / "state")] if state else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", service, *model, *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )
    assert done.returncode != 0
    assert f"token_file {tmp_path / 'none'}: No such file or directory; expected one key" in done.stderr
    assert "Traceback" not in done.stderr
