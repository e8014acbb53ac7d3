"""An engine's end on SIGTERM. This file's name makes it the last of its folder, as it stops the engines."""

from threading import Thread

import httpx
import pytest

from tests.contract.conftest import EngineUnderTest
from tests.contract.test_engine import COMPLETIONS, envelope
from tests.patience import patience, wait_until


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(bench: EngineUnderTest) -> None:
    body = {"model": "tiny-qwen", "prompt": "hello", "max_tokens": 600, "ignore_eos": True, "stream": True}
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{bench.engine.url}{COMPLETIONS}", json=body, timeout=patience(60)) as answer:
            lines.extend(answer.iter_lines())  # line by line

    reader = Thread(target=read)
    reader.start()
    wait_until(lambda: lines, what="the first line of the answer")
    bench.engine.process.terminate()

    def refusal() -> httpx.Response | None:
        answer = httpx.post(
            f"{bench.engine.url}{COMPLETIONS}", json={"prompt": "x", "max_tokens": 1}, timeout=patience(60)
        )
        return answer if answer.status_code != 200 else None

    answer = wait_until(refusal, what="a refusal")
    fault = "cannot schedule new futures after shutdown"
    assert (answer.status_code, answer.json()) == (500, envelope(fault, "InternalServerError", 500))
    assert httpx.get(f"{bench.engine.url}/health", timeout=patience(10)).status_code == 200
    reader.join(patience(120))
    assert lines[-2:] == ["data: [DONE]", ""]
    assert bench.engine.process.wait(patience(30)) == 0
