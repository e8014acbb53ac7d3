from workers.agent.incident_log import AgentIncidentLog, shortened
from workers.agent.supervisor import status_text


def test_incidents_are_kept_until_they_are_recorded_and_the_newest_of_too_many():
    log = AgentIncidentLog(lambda: "2027-01-01T00:00:00Z")
    for _ in range(250):
        log.record("engine_died", "killed")
    sent = log.unrecorded()
    assert [each.id for each in sent] == list(range(51, 71))
    log.forget_recorded(sent, 60)
    assert log.unrecorded()[0].id == 61
    log.forget_recorded(sent, None)  # an older orchestrator records none: what was sent is done
    assert log.unrecorded()[0].id == 71


def test_a_long_cause_keeps_its_first_line_and_its_last():
    cause = "the engine exited (status 1)\n" + "x" * 9000 + "\nCUDA out of memory"
    assert len(shortened(cause)) < 1100
    assert shortened(cause).startswith("the engine exited (status 1)\n")
    assert shortened(cause).endswith("CUDA out of memory")
    assert shortened("killed") == "killed"


def test_an_exit_by_a_signal_names_it():
    assert [status_text(code) for code in (0, 1, -9, 137, -11, 255)] == [
        "status 0",
        "status 1",
        "killed by SIGKILL, status -9",
        "killed by SIGKILL, status 137",
        "killed by SIGSEGV, status -11",
        "status 255",
    ]
