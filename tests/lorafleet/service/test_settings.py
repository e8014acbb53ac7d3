import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from lorafleet.cli.client import RestClient
from lorafleet.service.failure import CommandFailed
from lorafleet.service.settings import ServiceSettings, SettingsError, load, load_or_exit
from orchestrator.config import OrchestratorSettings
from router.config import RouterSettings
from workers.config import WorkerSettings


class ExampleSettings(ServiceSettings):
    """An example."""

    model_config = SettingsConfigDict(env_prefix="LORAFLEET_EXAMPLE_")

    port: int = Field(default=1, description="a port")
    wait_s: float = Field(default=2.0, gt=0, description="a time")
    names: tuple[str, ...] = Field(default=(), description="some names")
    costs: dict[str, float] = Field(default={}, description="some numbers")


def loaded(*argv):
    return load(ExampleSettings, argv, prog="example")


def test_settings_come_from_flag_environment_file_default_in_this_order(monkeypatch, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 3\nwait-s: 3.0\nnames: [c]\n")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_PORT", "4")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_WAIT_S", "4.0")
    found = loaded("--config", str(file), "--port", "5")
    assert (found.port, found.wait_s, found.names, found.host) == (5, 4.0, ("c",), "127.0.0.1")
    assert isinstance(found, ExampleSettings)


def test_a_list_repeats_its_flag_or_is_json_in_the_environment(monkeypatch):
    assert loaded("--names", "a", "--names", "b").names == ("a", "b")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_NAMES", '["x", "y"]')
    assert loaded().names == ("x", "y")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("NAMES", "/etc/a", """a list is JSON: '["/etc/a"]', found '/etc/a'"""),
        ("NAMES", "a, b", """'["a", "b"]'"""),
        ("NAMES", "[a", """'["a"]'"""),
        ("COSTS", "x=1", """a mapping is JSON: '{"NAME": VALUE}', found 'x=1'"""),
    ],
)
def test_an_invalid_list_or_mapping_in_the_environment_shows_the_form(monkeypatch, capsys, name, text, says):
    monkeypatch.setenv(f"LORAFLEET_EXAMPLE_{name}", text)
    with pytest.raises(SystemExit) as ended:
        load_or_exit(ExampleSettings, [], prog="example")
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert stderr.startswith(f"example: LORAFLEET_EXAMPLE_{name}: ")
    assert says in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("argv", [["--names", "[a"], ["--costs", "{a"]])
def test_an_unclosed_list_or_mapping_of_a_flag_is_refused(argv):
    with pytest.raises(SettingsError, match=argv[0].removeprefix("--")):
        loaded(*argv)


def test_a_mapping_without_names_shows_the_form():
    assert loaded("--costs", "x=1", "--costs", "y=2").costs == {"x": 1.0, "y": 2.0}
    with pytest.raises(SettingsError, match=r"^costs: expected NAME=VALUE"):
        loaded("--costs", "1")


def test_the_file_may_be_named_in_the_environment(monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text("port: 3")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_CONFIG", str(tmp_path / "c.yaml"))
    assert loaded().port == 3


def test_unknown_settings_are_refused_with_a_suggestion(monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text("prot: 3")
    with pytest.raises(SettingsError, match=r"prot: there is no such setting; did you mean port\?"):
        loaded("--config", str(tmp_path / "c.yaml"))
    with pytest.raises(SettingsError, match=r"--prot 3; did you mean --port\?"):
        loaded("--prot", "3")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_PROT", "3")
    with pytest.raises(SettingsError, match=r"LORAFLEET_EXAMPLE_PROT; did you mean LORAFLEET_EXAMPLE_PORT\?"):
        loaded()
    monkeypatch.delenv("LORAFLEET_EXAMPLE_PROT")
    monkeypatch.setenv("LORAFLEET_EXAMPLE_ZZ", "3")
    with pytest.raises(SettingsError, match=r"LORAFLEET_EXAMPLE_ZZ; known: .*LORAFLEET_EXAMPLE_PORT"):
        loaded()


@pytest.mark.parametrize("argv", [["--zzzz", "3"], ["--zzzz=3"], ["zzzz"], ["--port"]])
def test_a_wrong_flag_is_one_line(capsys, argv):
    with pytest.raises(SystemExit) as ended:
        load_or_exit(ExampleSettings, argv, prog="example")
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert argv[0] in stderr
    assert stderr.count("\n") == 1
    assert "did you mean" not in stderr


def test_help_prints_every_flag_and_exits_0(capsys):
    with pytest.raises(SystemExit) as ended:
        loaded("--help")
    assert ended.value.code == 0
    assert "--wait-s" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["", "=x", "--", "- -", "stray"])
def test_an_argument_that_is_no_flag_is_refused(word):
    with pytest.raises(SettingsError, match="unrecognized arguments"):
        loaded(word)


def test_a_file_that_is_no_text_says_what_was_expected(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"port: \xb7")
    with pytest.raises(SettingsError, match=r"c\.yaml: not text in UTF-8 \(byte 6\); expected a YAML file$"):
        loaded("--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("argv", [["--wait-s", "0"], ["--port", "x"], ["--log-level", "loud"]])
def test_a_value_out_of_range_is_refused_and_named(argv):
    with pytest.raises(SettingsError, match=argv[0].removeprefix("--")):
        loaded(*argv)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[1]", "a: [", "3", "port: 2026-13-45", "a: " + "[" * 3000])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SettingsError, match=r"c\.yaml"):
        loaded("--config", str(tmp_path / "c.yaml"))


def test_settings_are_frozen_and_do_not_show_the_token():
    found = loaded("--token", "hush")
    assert "hush" not in repr(found)
    with pytest.raises(Exception, match="frozen"):
        found.port = 7


@pytest.mark.parametrize(
    ("service", "flag"),
    [
        (RouterSettings, "--orchestrator-url"),
        (RouterSettings, "--otlp-endpoint"),
        (OrchestratorSettings, "--advertise-url"),
        (WorkerSettings, "--orchestrator-url"),
        (WorkerSettings, "--engine-url"),
        (WorkerSettings, "--engine-advertise-url"),
        (WorkerSettings, "--advertise-url"),
    ],
)
def test_an_invalid_address_is_refused_at_the_start_by_name(service, flag):
    given = ["--model", "m", flag] if service is WorkerSettings else [flag]
    refused = rf"{flag.removeprefix('--')}: .* must be an address, such as http://host:port"
    for text in (
        "foo",
        "foo:8080",
        "http://",
        "http://foo:port",
        "http://foo:99999",
        "ftp://foo",
        "http://f oo",
        "http://foo?x",
        "http://foo/#x",
        "http://me:hidden@foo",
        "http://foo?key=hidden",
    ):
        with pytest.raises(SettingsError, match=refused) as caught:
            load(service, [*given, text], prog="it")
        assert "hidden" not in str(caught.value)
    load(service, [*given, "https://[::1]:8080/below"], prog="it")


def test_each_of_several_orchestrators_must_be_an_address():
    several = ["--model", "m", "--orchestrator-url"]
    assert load(WorkerSettings, [*several, "http://a:1, http://b:2"], prog="it").orchestrator_urls == (
        "http://a:1",
        "http://b:2",
    )
    with pytest.raises(SettingsError, match="orchestrator-url: 'b:2' must be"):
        load(WorkerSettings, [*several, "http://a:1,b:2"], prog="it")


def test_a_token_file_may_end_with_a_line_break(monkeypatch):
    monkeypatch.setenv("LORAFLEET_EXAMPLE_TOKEN", "lf-secret\n")
    assert loaded().token == "lf-secret"


@pytest.mark.parametrize("token", ["lf-secret\nlf-other", "lf-secret two", "lf-sécret", "lf-secret\x7f"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch, capsys, token):
    monkeypatch.setenv("LORAFLEET_EXAMPLE_TOKEN", token)
    with pytest.raises(SystemExit) as ended:
        load_or_exit(ExampleSettings, [], prog="example")
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert stderr.startswith("example: token: must be one key")
    assert "lf-" not in stderr
    with pytest.raises(CommandFailed) as refused:
        RestClient("http://127.0.0.1:1", token)
    assert "lf-" not in str(refused.value)
    assert refused.value.status == 2


@pytest.mark.parametrize("service", [RouterSettings, OrchestratorSettings])
def test_an_engines_key_is_read_as_a_token_is(monkeypatch, service):
    name = f"{service.model_config['env_prefix']}ENGINE_KEY"
    monkeypatch.setenv(name, "engine-secret\n")
    assert load(service, [], prog="it").engine_key == "engine-secret"
    monkeypatch.setenv(name, "engine-secret\r\nx: y")
    with pytest.raises(SettingsError, match="engine-key: must be one key") as refused:
        load(service, [], prog="it")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("service", "flag"),
    [
        (RouterSettings, "--grace-s"),
        (RouterSettings, "--drain-s"),
        (OrchestratorSettings, "--stop-grace-s"),
        (WorkerSettings, "--stop-grace-s"),
    ],
)
def test_an_endless_stop_time_is_refused_at_the_start(service, flag):
    with pytest.raises(SettingsError, match=f"{flag.removeprefix('--')}: Input should be a finite number"):
        load(service, ["--model=m", flag, "inf"] if service is WorkerSettings else [flag, "inf"], prog="it")
