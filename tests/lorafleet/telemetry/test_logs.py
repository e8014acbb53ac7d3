import array
import fcntl
import json
import subprocess
import sys
import termios
import textwrap

import pytest
from structlog.testing import capture_logs

from lorafleet.service.loops import log
from tests.patience import patience, wait_until

BEGIN = """
import asyncio, logging, os, signal, sys, threading, time, warnings
import structlog
from lorafleet.telemetry import logs
logs.configure("test")
log = structlog.get_logger()
def interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.kill(os.getpid(), signal.SIGINT)
drain = structlog.get_config()["logger_factory"]._file.drain
"""
MANY = 30_000


def program(text: str) -> list[str]:
    return [sys.executable, "-c", BEGIN + textwrap.dedent(text)]


def lines_of(lines: bytes) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]


def unread_bytes(pipe) -> int:
    """The content of the pipe, which holds 65,536 bytes on Linux."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def ran(text: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(program(text), capture_output=True, timeout=patience(60), check=False, **kwargs)


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('at the end')", 1), ("interrupted()", -2)],
)
def test_no_line_is_lost_at_any_kind_of_exit(end, status):
    done = ran(f"for n in range(300): log.info('a line', n=n)\n{end}")
    assert done.returncode == status
    lines = lines_of(done.stderr)
    assert [line["n"] for line in lines[:300]] == list(range(300))
    last = [line["exception"][0]["exc_type"] for line in lines[300:]]
    assert last == {1: ["ValueError"], -2: ["KeyboardInterrupt"]}.get(status, [])


def test_the_libraries_lines_are_written_in_order_too():
    lines = lines_of(
        ran("log.info('ours')\nlogging.getLogger('uvicorn').error('theirs')\nlog.info('ours again')").stderr
    )
    assert [line["event"] for line in lines] == ["ours", "theirs", "ours again"]
    assert {line["component"] for line in lines} == {"test"}


def test_a_reader_that_is_gone_only_loses_lines():
    text = """
        sys.stdin.read()
        for n in range(100): log.info("nobody hears", n=n)
        logging.getLogger("uvicorn").error("nor this")
        print("went on")
    """
    with subprocess.Popen(
        program(text), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stderr.close()
        process.stdin.close()
        assert process.stdout.read() == b"went on\n"
        assert process.wait(patience(30)) == 0


def test_a_stalled_reader_blocks_nothing_and_gets_the_number_of_lost_lines():
    text = f"""
        for n in range({MANY}): log.info("a line", n=n)
        print("went on", flush=True)
        sys.stdin.read()
        log.info("the last one")
    """
    with subprocess.Popen(
        program(text), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"went on\n"
        process.stdin.close()
        lines = lines_of(process.stderr.read())
        assert process.wait(patience(30)) == 0
    dropped = [line for line in lines if line["event"].endswith("log lines were dropped")]
    lines = [line for line in lines if line["event"] == "a line"]
    assert dropped
    assert len(lines) > 10_000
    assert len(lines) + sum(line["lines"] for line in dropped) in (MANY, MANY + 1)  # the last one may be among them


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ValueError", 1)])
def test_a_stalled_reader_does_not_delay_the_exit(end, status):
    text = f"for n in range({MANY}): log.info('a line')\n{end}"
    with subprocess.Popen(program(text), stderr=subprocess.PIPE) as process:
        assert process.wait(patience(30)) == status


def test_a_disk_with_room_again_gets_the_count_and_whole_lines(tmp_path):
    text = f"""
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        for n in range(7): log.info("lost", n=n)
        drain(30)
        os.dup2(os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_CREAT), 2)
        log.info("kept")
    """
    assert ran(text).returncode == 0
    lines = lines_of((tmp_path / "log").read_bytes())
    assert [line["event"] for line in lines] == ["7 log lines were dropped", "kept"]
    assert lines[0] | {"level": "warning", "component": "test", "lines": 7} == lines[0]


def test_a_line_cut_by_a_full_disk_spoils_no_other(tmp_path):
    text = f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
        os.dup2(file, 2)
        log.info("cut")
        drain(30)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.info("whole")
    """
    assert ran(text).returncode == 0
    cut, *whole = (tmp_path / "log").read_bytes().splitlines()
    assert len(cut) == 20
    assert [json.loads(line)["event"] for line in whole] == ["1 log lines were dropped", "whole"]


def test_a_non_blocking_pipe_loses_no_line():
    text = """
        os.set_blocking(2, False)
        for n in range(3000): log.info("a line", n=n)
        drain(60)
    """
    with subprocess.Popen(program(text), stderr=subprocess.PIPE) as process:
        wait_until(lambda: unread_bytes(process.stderr) > 50_000, what="the pipe is full")
        assert [line["n"] for line in lines_of(process.stderr.read())] == list(range(3000))


def test_a_forked_child_writes_its_own_lines_and_none_of_its_parents():
    text = """
        log.info("before")
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork of a process with threads
        pid = os.fork()
        if pid == 0:
            log.info("child")
            sys.exit(0)
        os.waitpid(pid, 0)
        log.info("parent")
    """
    assert [line["event"] for line in lines_of(ran(text).stderr)] == ["before", "child", "parent"]


def test_a_process_without_stderr_writes_into_no_other_file(tmp_path):
    text = f"""
        file = open({str(tmp_path / "other")!r}, "wb")
        log.info("into nothing")
    """
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *program(text)]
    assert subprocess.run(shell, timeout=patience(60), check=False).returncode == 0
    assert (tmp_path / "other").read_bytes() == b""


def test_logging_works_without_new_threads():
    text = """
        start = threading.Thread.start
        def refused(self): raise RuntimeError("can't start new thread")
        threading.Thread.start = refused
        log.info("while there are no threads")
        threading.Thread.start = start
        log.info("later")
    """
    lines = lines_of(ran(text).stderr)
    assert [line["event"] for line in lines] == ["while there are no threads", "later"]


def test_tests_capture_what_is_logged():
    with capture_logs() as lines:
        log.info("captured")
    assert [line["event"] for line in lines] == ["captured"]
