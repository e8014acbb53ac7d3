import contextlib
import os
import resource
import time
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lorafleet.keys.auth import SETTLE_S, ApiKeys, check_host, host_check, refuse_open_server, requires
from lorafleet.keys.key_edits import add_key
from lorafleet.keys.key_files import FIRST_LINE, RECHECK_S, KeyFileError, hash_key, new_key, read_key_files, with_marks
from lorafleet.keys.roles import ANYONE, SCOPES, TENANT_SCOPES, Caller
from lorafleet.service.failure import CommandFailed
from lorafleet.service.http import HttpError, install_error_handlers
from orchestrator.model.limits import AccountLimits, LimitedAccount
from tests.serving import client_of, serving


def key_file(path, *entries):
    lines = [f"- {{sha256: {hash_key(key)}, tenant: {tenant}, scopes: [{scopes}]}}" for key, tenant, scopes in entries]
    path.write_text("keys:\n" + "\n".join(lines) + "\n")
    return path


class KeyFileClock:
    now = 0.0

    def __call__(self):
        self.now += 10.0
        return self.now


def test_without_a_key_file_every_caller_may_do_everything():
    assert ApiKeys([]).caller(None) is ANYONE
    assert ApiKeys([]).caller("Bearer whatever") is ANYONE


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic one", "one", "Bearer two", "bearer  "])
def test_a_missing_or_unknown_key_is_refused(tmp_path, header):
    keys = ApiKeys([key_file(tmp_path / "k", ("one", "acme", "infer"))])
    with pytest.raises(HttpError) as refused:
        keys.caller(header)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_a_known_key_gives_its_tenant_and_scopes(tmp_path):
    keys = ApiKeys(
        [key_file(tmp_path / "a", ("one", "acme", "infer")), key_file(tmp_path / "b", ("two", "null", "admin"))]
    )
    assert keys.caller("Bearer one") == Caller("acme", frozenset({"infer"}), hash_key("one")[:12])
    assert keys.caller("bearer two") == Caller(None, frozenset({"admin"}), hash_key("two")[:12])
    assert keys.caller(b"Bearer one") == keys.caller("Bearer one")


def test_a_valid_header_is_cached_until_a_file_changes(tmp_path):
    path = key_file(tmp_path / "k", ("one", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    assert keys.caller("Bearer one").tenant == "acme"
    with pytest.raises(HttpError):
        keys.caller("Bearer two")
    assert list(keys.cached_callers) == ["Bearer one"]
    key_file(path, ("one", "other", "infer"))
    assert [keys.caller("Bearer one").tenant for _ in range(2)] == ["acme", "other"], "it may still be written at first"
    key_file(path, ("two", "acme", "infer"))
    assert keys.caller("Bearer one")
    with pytest.raises(HttpError):
        keys.caller("Bearer one")


def test_a_header_of_mostly_blanks_is_valid_and_not_cached(tmp_path):
    keys = ApiKeys([key_file(tmp_path / "k", ("one", "acme", "infer"))])
    assert keys.caller(b"Bearer " + b" " * 60_000 + b"one").tenant == "acme"
    assert not keys.cached_callers


def test_the_header_cache_is_bounded(tmp_path):
    keys = ApiKeys([key_file(tmp_path / "k", ("one", "acme", "infer"))])
    for spaces in range(10_000):
        assert keys.caller("Bearer " + " " * (spaces % 9000) + "one").tenant == "acme"
    assert len(keys.cached_callers) <= 4096


def test_every_limit_of_a_key_is_optional(tmp_path):
    path = tmp_path / "k"
    entries = [("one", "{requests_per_minute: 60, concurrent_requests: 3}"), ("two", "{}"), ("three", "null")]
    lines = [f"- {{sha256: {hash_key(key)}, scopes: [infer], limits: {limits}}}" for key, limits in entries]
    path.write_text("keys:\n" + "\n".join(lines) + "\n")
    keys = ApiKeys([path])
    assert keys.caller("Bearer one").limits == AccountLimits(requests_per_minute=60, concurrent_requests=3)
    assert keys.caller("Bearer two").limits is None
    assert keys.caller("Bearer three").limits is None


def test_limits_of_a_tenant_hold_for_its_keys_of_all_files_and_change_with_their_file(tmp_path):
    path, now = key_file(tmp_path / "k", ("one", "acme", "infer"), ("two", "umbrella", "infer")), [0.0]
    beside = tmp_path / "t"
    beside.write_text(with_marks("tenants: {acme: {limits: {requests_per_minute: 60}}, umbrella: {limits: {}}}"))
    keys = ApiKeys([path, beside], clock=lambda: now[0])
    assert keys.caller("Bearer one").tenant_limits == AccountLimits(requests_per_minute=60)
    assert keys.caller("Bearer one").limited == (LimitedAccount("tenant acme", AccountLimits(requests_per_minute=60)),)
    assert keys.caller("Bearer two").limited == ()
    beside.write_text(with_marks("tenants: {umbrella: {limits: {bytes_per_minute: 5}}}"))
    now[0] += RECHECK_S
    assert keys.caller("Bearer one").limited == ()
    assert keys.caller("Bearer two").tenant_limits == AccountLimits(bytes_per_minute=5)


def test_accounts_with_budgets_are_those_of_all_files_as_they_are_now(tmp_path):
    path, now = tmp_path / "k", [0.0]
    key = hash_key("one")

    def write(limits, tenant):
        text = (
            f"keys: [{{sha256: {key}, tenant: acme, scopes: [infer], limits: {limits}}}]\ntenants: {{acme: {tenant}}}"
        )
        path.write_text(with_marks(text))
        now[0] += RECHECK_S

    write("{tokens_per_day: 5}", "{limits: {soft_engine_seconds_per_month: 7}}")
    keys = ApiKeys([path], clock=lambda: now[0])
    assert dict(keys.budgeted) == {
        key[:12]: AccountLimits(tokens_per_day=5),
        "tenant acme": AccountLimits(soft_engine_seconds_per_month=7),
    }
    write("{tokens_per_minute: 5}", "{limits: {tokens_per_day: 9}}")
    assert dict(keys.budgeted) == {"tenant acme": AccountLimits(tokens_per_day=9)}


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ("[acme]", "tenants must be"),
        ("{'': {limits: {}}}", "tenants must be"),
        (f"{{{'a' * 201}: {{limits: {{}}}}}}", "at most 200 characters"),
        ("{acme: {requests_per_minute: 3}}", "tenant acme: expected `limits"),
        ("{acme: {limits: {requests_per_minute: 0}}}", "tenant acme: requests_per_minute must be"),
    ],
)
def test_limits_of_a_tenant_with_a_typo_are_refused_and_named(tmp_path, tenants, says):
    path = tmp_path / "k"
    path.write_text(f"tenants: {tenants}")
    with pytest.raises(KeyFileError) as refused:
        ApiKeys([path])
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ("{request_per_minute: 3}", "requests_per_minute, tokens_per_minute, bytes_per_minute, concurrent_requests"),
        ("[3]", "limits must be"),
        ("{requests_per_minute: 0}", "at least 1"),
        ("{requests_per_minute: -1}", "at least 1"),
        ("{tokens_per_minute: many}", "found 'many'"),
        ("{tokens_per_minute: true}", "found True"),
        ("{tokens_per_minute: .inf}", "found inf"),
        (f"{{tokens_per_minute: 1{'0' * 400}}}", "at most 2"),
        ("{tokens_per_minute: .nan}", "found nan"),
        ("{concurrent_requests: 1.5}", "whole number"),
        ("{tokens_per_week: 5}", "tokens_per_day, tokens_per_month, engine_seconds_per_day, engine_seconds_per_month"),
        ("{tokens_per_day: 0}", "tokens_per_day must be a number of at least 1"),
        ("{tokens_per_day: 5, soft_tokens_per_day: 6}", "soft_tokens_per_day must be at most tokens_per_day (5)"),
    ],
)
def test_a_limit_with_a_typo_is_refused_and_named(tmp_path, limits, says):
    path = tmp_path / "k"
    path.write_text(f"keys: [{{sha256: {'a' * 64}, scopes: [infer], limits: {limits}}}]")
    with pytest.raises(KeyFileError, match="entry 0") as refused:
        ApiKeys([path])
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["2027-01-31T00:00:00Z", "2027-01-31", "'2027-01-31T00:00:00+00:00'"])
def test_a_key_is_refused_from_its_expiry_on_even_if_it_is_cached(tmp_path, text):
    path, at = tmp_path / "k", 1801353599.0
    path.write_text(f"keys: [{{sha256: {hash_key('one')}, scopes: [infer], expires: {text}}}]")
    keys = ApiKeys([path], wall=lambda: at)
    for _ in range(2):
        assert keys.caller("Bearer one").expires_at == 1801353600.0
    at += 1
    for _ in range(2):
        with pytest.raises(HttpError, match="2027-01-31T00:00:00Z") as refused:
            keys.caller("Bearer one")
        assert (refused.value.status, refused.value.code) == (401, "expired_api_key")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("scopes: [infer], expires: soon", "expires must be a UTC time"),
        ("scopes: [tenant-admin]", "needs a tenant"),
        ("scopes: [operate], tenant: acme", "whole fleet"),
        ("scopes: [infer], tenant: ''", "tenant must be a name"),
        ("scopes: [infer], tenant: ' '", "tenant must be a name"),
        ("scopes: [infer], tenant: 7", "tenant must be a name"),
    ],
)
def test_an_entry_that_says_less_or_more_than_it_means_is_refused(tmp_path, entry, says):
    path = tmp_path / "k"
    path.write_text(f"keys: [{{sha256: {'a' * 64}, {entry}}}]")
    with pytest.raises(KeyFileError, match=f"entry 0.*{says}"):
        ApiKeys([path])


@given(st.sampled_from(SCOPES), st.sampled_from(SCOPES))
def test_a_tenants_key_has_no_scope_of_a_tenant_for_the_fleet(held, wanted):
    mine, ours = Caller("acme", frozenset({held})), Caller(None, frozenset({held}))
    assert mine.may(wanted) == ours.may(wanted) == ours.may_for_fleet(wanted)
    assert mine.may_for_fleet(wanted) == (mine.may(wanted) and held not in TENANT_SCOPES)
    if mine.only_tenant is None:
        assert ours.may("load") or ours.may("operate")


def test_a_new_key_has_the_given_limits(tmp_path):
    path = tmp_path / "k"
    key = add_key(path, "acme", ["infer"], limits={"requests_per_minute": 5, "tokens_per_minute": None})
    plain = add_key(path, None, ["admin"])
    keys = ApiKeys([path])
    assert keys.caller(f"Bearer {key}").limits == AccountLimits(requests_per_minute=5)
    assert keys.caller(f"Bearer {plain}").limits is None


@pytest.mark.parametrize("limit", [0, -1, 2**53 + 1, 10**18])
def test_a_limit_that_no_service_takes_leaves_the_key_file_as_it_was(tmp_path, limit):
    path = tmp_path / "k"
    key = add_key(path, "acme", ["infer"], limits={"tokens_per_minute": 2**53})
    with pytest.raises(CommandFailed, match=r"--tokens-per-minute: .*leave the flag out"):
        add_key(path, "acme", ["infer"], limits={"tokens_per_minute": limit})
    assert ApiKeys([path]).caller(f"Bearer {key}").limits == AccountLimits(tokens_per_minute=2**53)


@pytest.mark.parametrize(
    "broken",
    [
        b"keys: [{sha256: %s, scopes: [[infer]]}]" % (b"ab" * 32),
        b"\xff\xfe",
        b"keys: [",
        b"",
        b"keys: 2020-13-45",
        pytest.param(b"keys: " + b"[" * 1000, id="a deep nest"),
    ],
)
def test_an_invalid_key_file_leaves_the_last_good_one_in_force(tmp_path, broken):
    path = key_file(tmp_path / "k", ("one", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    path.write_bytes(broken)
    assert keys.caller("Bearer one")
    with pytest.raises(KeyFileError):
        ApiKeys([path])


def test_a_changed_key_file_takes_effect_unless_it_is_invalid(tmp_path):
    path = key_file(tmp_path / "k", ("one", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    assert keys.caller("Bearer one")
    path.write_text("keys: [{sha256: nonsense}]")
    assert keys.caller("Bearer one")
    path.unlink()
    assert keys.caller("Bearer one")
    key_file(path, ("two", "acme", "infer"))
    assert keys.caller("Bearer one"), "it may still be written"
    assert keys.caller("Bearer two")
    with pytest.raises(HttpError):
        keys.caller("Bearer one")


class SlowClock:
    """Time that a test moves by hand: a look at the key files a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def looked(keys, clock, key):
    """Whether the key is known at the next look at the files."""
    clock.now += RECHECK_S
    try:
        return bool(keys.caller(f"Bearer {key}"))
    except HttpError:
        return False


MARKED = with_marks(
    "keys:\n"
    f"- sha256: {hash_key('first')}\n  scopes: [admin]\n  tenant: acme\n  expires: 2099-01-01T00:00:00Z\n"
    f"- {{sha256: {hash_key('second')}, scopes: [infer]}}\n"
    f"- sha256: {hash_key('last')}\n  scopes: [infer]\n  tenant: acme\n"
)


def test_a_marked_key_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    path = tmp_path / "k"
    for cut in range(len(FIRST_LINE), len(MARKED) - 2):
        path.write_text(MARKED[:cut])
        with pytest.raises(KeyFileError):
            read_key_files([path])
    path.write_text(MARKED)
    assert len(read_key_files([path])) == 3


def test_what_is_added_behind_the_last_mark_is_refused_with_the_place_where_it_goes(tmp_path):
    path = tmp_path / "k"
    path.write_text(f"{MARKED}issuers: []\n")
    with pytest.raises(KeyFileError, match="move what was added above '# end'"):
        read_key_files([path])


def test_a_marked_key_file_counts_at_the_next_look_and_a_cut_one_never(tmp_path):
    path, clock = tmp_path / "k", SlowClock()
    path.write_text(MARKED)
    keys = ApiKeys([path], clock=clock)
    whole = MARKED.replace(hash_key("second"), hash_key("third"))
    for line in range(1, whole.count("\n")):
        path.write_text("\n".join(whole.split("\n")[:line]) + "\n")
        for _ in range(5):
            assert [looked(keys, clock, key) for key in ("first", "second", "last", "third")] == [True] * 3 + [False]
    path.write_text(whole)
    assert [looked(keys, clock, key) for key in ("second", "third")] == [False, True]


def test_a_key_file_without_marks_that_is_being_written_counts_once_it_stands_still(tmp_path):
    entries = [(key, "acme", "infer") for key in ("service", "one", "two")]
    path, clock = key_file(tmp_path / "k", *entries), SlowClock()
    keys = ApiKeys([path], clock=clock)
    text = path.read_text() + f"- {{sha256: {hash_key('new')}, scopes: [infer]}}\n"
    lines = text.splitlines(keepends=True)
    for count in range(2, len(lines)):
        path.write_text("".join(lines[:count]))
        assert looked(keys, clock, "service"), count
        assert looked(keys, clock, "two"), count
    path.write_text(text)
    assert not looked(keys, clock, "new")
    assert [looked(keys, clock, key) for _ in range(2) for key in ("service", "new")] == [True, True, True, True]
    key_file(path, *entries[1:])
    assert [looked(keys, clock, "service") for _ in range(4)] == [True, True, False, False], "revoked by hand"


def test_a_key_file_without_marks_that_was_written_a_while_ago_counts_at_the_first_look(tmp_path):
    path, clock = key_file(tmp_path / "k", ("leaked", "acme", "infer"), ("good", "acme", "infer")), SlowClock()
    keys = ApiKeys([path], clock=clock)
    key_file(path, ("good", "acme", "infer"))
    written = time.time() - SETTLE_S - 1
    os.utime(path, (written, written))
    assert not looked(keys, clock, "leaked")


@contextlib.contextmanager
def no_more_files():
    """Nothing can be opened or connected to, though everything is there."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_key_is_revoked_after_failed_reads_of_its_file(tmp_path):
    path = key_file(tmp_path / "k", ("leaked", "acme", "infer"), ("good", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    key_file(path, ("good", "acme", "infer"))
    with capture_logs() as logs:
        with no_more_files():
            for _ in range(3):
                assert keys.caller("Bearer leaked")
        with pytest.raises(HttpError):
            keys.caller("Bearer leaked")
        assert keys.caller("Bearer good")
    assert [line["log_level"] for line in logs] == ["error", "info"]


def test_an_invalid_file_is_read_once_and_each_new_error_is_logged(tmp_path):
    path = key_file(tmp_path / "k", ("one", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    with capture_logs() as logs:
        path.write_text("keys: [{sha256: nonsense}]")
        keys.caller("Bearer one")
        with no_more_files():  # it would be reported as unreadable
            keys.caller("Bearer one")
        path.unlink()
        keys.caller("Bearer one")
        keys.caller("Bearer one")
    assert len(logs) == 2
    assert "sha256" in logs[0]["error"]
    assert "No such file" in logs[1]["error"]


def test_a_restored_file_and_its_next_loss_are_logged(tmp_path):
    path = key_file(tmp_path / "k", ("one", "acme", "infer"))
    keys = ApiKeys([path], clock=KeyFileClock())
    with capture_logs() as logs:
        for _ in range(2):
            away = path.rename(tmp_path / "away")
            keys.caller("Bearer one")
            away.rename(path)
            keys.caller("Bearer one")
    assert [line["log_level"] for line in logs] == ["error", "info"] * 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "keys: 3",
        "keys: [3]",
        "keys: [{sha256: abc, scopes: [infer]}]",
        f"keys: [{{sha256: {'a' * 64}, scopes: []}}]",
        f"keys: [{{sha256: {'a' * 64}, scopes: [root]}}]",
        f"keys: [{{sha256: {'a' * 64}, scopes: [infer], tenant: 3}}]",
        f"keys: [{{sha256: {'a' * 64}, scopes: [infer], tennant: x}}]",
        "keys: [",
        f"keys: [{{sha256: {'a' * 64}, scopes: [infer]}}]\nkeys: []",
        f"keys: [{{sha256: {'a' * 64}, scopes: [infer], scopes: [admin]}}]",
    ],
)
def test_an_invalid_file_is_refused_at_the_start_by_name(tmp_path, text):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=r"keys\.yaml"):
        ApiKeys([path])


@given(st.sets(st.sampled_from(["infer", "load", "admin"]), min_size=1))
def test_a_wider_scope_includes_the_narrower_ones(scopes):
    caller = Caller("acme", frozenset(scopes))
    assert caller.may("infer")
    assert caller.may("load") == bool(scopes & {"load", "admin"})
    assert caller.may("admin") == ("admin" in scopes)


def test_an_adapter_may_be_used_by_its_tenants_and_operators():
    user, nobody = Caller("acme", frozenset({"infer"})), Caller(None, frozenset({"infer"}))
    assert user.may_use(None)
    assert user.may_use(("acme", "other"))
    assert not user.may_use(("other",))
    assert not user.may_use(())
    assert not nobody.may_use(("acme",))
    assert ANYONE.may_use(("acme",))


@pytest.mark.parametrize(
    ("host", "refused"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("worker-7", True)],
)
def test_a_server_without_keys_listens_on_loopback_unless_allowed(host, refused):
    if refused:
        with pytest.raises(KeyFileError, match=r"--key-files"):
            refuse_open_server(ApiKeys([]), host, allow_open=False)
    else:
        refuse_open_server(ApiKeys([]), host, allow_open=False)
    refuse_open_server(ApiKeys([]), host, allow_open=True)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "127.1",
        "[::1]:8000",
        "[::1]",
        "10.1.2.3",
        "router",
        "box:80",
    ],
)
@pytest.mark.parametrize("below", ["", ".localhost", ".local", ".internal", ".svc.cluster.local."])
def test_an_open_server_answers_requests_to_addresses_and_reserved_names(host, below):
    check_host(host)
    check_host(f"router{below}:8000")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "local.evil", "a.b.", "x.[::1]"]
)
def test_dns_rebinding_to_an_open_server_is_refused(host):
    for _ in range(2):
        with pytest.raises(HttpError, match="not a name of this machine") as refused:
            check_host(host)
        assert (refused.value.status, refused.value.code) == (421, "unknown_host")


def test_the_host_is_checked_only_without_keys(tmp_path):
    assert host_check(ApiKeys([]), allow_open=False) is check_host
    assert host_check(ApiKeys([]), allow_open=True) is None
    assert host_check(ApiKeys([key_file(tmp_path / "k", ("one", "acme", "infer"))]), allow_open=False) is None


def test_new_keys_differ_from_each_other_and_their_hashes():
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(len(key) > 40 and key not in hash_key(key) for key in keys)


async def test_errors_of_every_kind_come_in_one_envelope(tmp_path):
    keys = ApiKeys([key_file(tmp_path / "k", ("one", "acme", "infer"))])
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/admin", dependencies=[Depends(requires(keys, "admin"))])
    async def admin(): ...

    @app.get("/number")
    async def number(n: int): ...

    @app.get("/broken")
    async def broken():
        raise RuntimeError("secret detail")

    async with serving(app) as url, client_of(url) as client:
        answers = {
            "/admin": await client.get("/admin"),
            "/admin+key": await client.get("/admin", headers={"authorization": "Bearer one"}),
            "/number": await client.get("/number?n=x"),
            "/broken": await client.get("/broken"),
            "/nowhere": await client.get("/nowhere"),
            "/v1/v1/admin": await client.get("/v1/v1/admin"),
            "/v1/nowhere": await client.get("/v1/nowhere"),
            "/v1/\u20ac": await client.get("/v1/\u20ac" + "x" * 100),
            "post": await client.post("/admin"),
        }
    found = {name: (a.status_code, a.json()["error"]["code"]) for name, a in answers.items()}
    assert found == {
        "/admin": (401, "invalid_api_key"),
        "/admin+key": (403, "scope_missing"),
        "/number": (400, "invalid_request"),
        "/broken": (500, "internal_error"),
        "/nowhere": (404, "not_found"),
        "/v1/v1/admin": (404, "not_found"),
        "/v1/nowhere": (404, "not_found"),
        "/v1/\u20ac": (404, "not_found"),
        "post": (405, "method_not_allowed"),
    }
    assert answers["/number"].json()["error"]["param"] == "query.n"
    logs = {name: answer.json()["error"]["message"] for name, answer in answers.items()}
    assert logs["post"] == "/admin takes GET, found POST"
    is_wrong_base = ": paths of the API begin with /v1, once"
    assert logs["/nowhere"] == f"there is no /nowhere here{is_wrong_base}; GET /docs shows what there is"
    assert logs["/v1/v1/admin"] == f"there is no /v1/v1/admin here{is_wrong_base}; GET /docs shows what there is"
    assert logs["/v1/nowhere"] == "there is no /v1/nowhere here; GET /docs shows what there is"
    assert logs["/v1/\u20ac"] == f"there is no /v1/\\u20ac{'x' * 72}... here; GET /docs shows what there is"
    assert "secret" not in answers["/broken"].text
    assert answers["/admin"].headers["www-authenticate"] == "Bearer"


NAMING: dict[str, Any] = {"namespace": "team-a", "lora_ids": ("team-a/*", "shared/x"), "may_shadow_base": True}


def test_key_has_the_namespace_and_names_of_its_file(tmp_path):
    key = add_key(tmp_path / "k", "acme", ["infer", "register"], **NAMING)

    caller = ApiKeys([tmp_path / "k"]).caller(f"Bearer {key}")

    assert (caller.namespace, caller.lora_ids, caller.may_shadow_base) == ("team-a", ("team-a/*", "shared/x"), True)
    assert (caller.whole_name("policy"), caller.whole_name("team-a/policy")) == ("team-a/policy",) * 2
    assert (caller.short_name("team-a/policy"), caller.short_name("team-ab/x")) == ("policy", "team-ab/x")
    names = ("team-a/policy", "team-a/x/y", "shared/x", "shared/y", "team-ab/x", "policy")
    assert [caller.may_name(name) for name in names] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("caller", "may"),
    [
        (Caller(None, frozenset({"register"})), [True, True, True]),
        (Caller("acme", frozenset({"admin"})), [True, True, True]),
        (Caller("acme", frozenset({"register"})), [False, False, True]),
        (Caller("acme", frozenset({"load", "register"})), [False, False, True]),
        (Caller("acme", frozenset({"register"}), namespace="team-a"), [True, False, False]),
        (Caller("acme", frozenset({"register"}), lora_ids=("b/*",)), [False, True, False]),
        (Caller("acme*", frozenset({"register"})), [False, False, False]),
    ],
)
def test_key_without_patterns_names_what_is_below_its_namespace_or_tenant_and_an_operators_anything(caller, may):
    assert [caller.may_name(name) for name in ("team-a/x", "b/x", "acme/x")] == may


def test_folders_of_a_key_are_its_tenants_its_namespaces_and_those_that_its_file_grants_whole():
    caller = Caller("acme", frozenset({"register"}), namespace="team", lora_ids=("run/*", "sql-*", "*", "a*/*", "b/x"))
    assert caller.own_prefixes == ("acme/", "team/", "run/")
    assert Caller(None, frozenset({"admin"}), namespace="team").own_prefixes == ()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("namespace: a/../b", "namespace"),
        ("namespace: 'a b'", "namespace"),
        ("namespace: [a]", "namespace"),
        ("lora_ids: team-a/*", "lora_ids"),
        ("lora_ids: []", "lora_ids"),
        ("may_shadow_base: true", "needs a namespace"),
        ("may_shadow_base: 1.5, namespace: a", "true or false"),
    ],
)
def test_key_file_with_wrong_naming_is_refused_with_the_reason(tmp_path, fields, why):
    path = tmp_path / "k"
    path.write_text(f"keys:\n- {{sha256: {hash_key('one')}, scopes: [infer], {fields}}}\n")
    with pytest.raises(KeyFileError, match=why):
        ApiKeys([path])
