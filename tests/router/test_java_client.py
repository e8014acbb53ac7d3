"""Java's own HTTP client, which asks for HTTP/2 with every request in clear text: the one below most Java SDKs."""

import asyncio
import shutil
from asyncio.subprocess import PIPE

import pytest

from tests.lorafleet.http_server.test_listener import served
from tests.patience import patience
from tests.router.doubles import EngineDouble, fleet

NEEDS_JAVA = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java 11 or later")
pytestmark = [pytest.mark.fleet, NEEDS_JAVA]

# Asks each URL three times, the last time for a streamed answer; prints status and length of each.
PROGRAM = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] urls) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        int length = Integer.getInteger("length");
        for (String url : urls) {
            for (String stream : new String[] {"false", "false", "true"}) {
                String body = "{\\"model\\": \\"tiny-qwen\\", \\"max_tokens\\": 8, \\"stream\\": " + stream
                    + ", \\"messages\\": "
                    + "[{\\"role\\": \\"user\\", \\"content\\": \\"" + "x".repeat(length) + "\\"}]}";
                HttpRequest request = HttpRequest.newBuilder(URI.create(url))
                    .header("content-type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(body)).build();
                HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                System.out.println(answer.statusCode() + " " + answer.body().strip().lines().reduce((a, b) -> b).get());
            }
        }
    }
}
"""


async def said(tmp_path, *urls: str, length: int = 100_000) -> list[str]:
    """What Java's client prints of its answers from these; `length`: characters of its message."""
    source = tmp_path / "Ask.java"
    source.write_text(PROGRAM)
    # One file is compiled and run in one step, with the little that this needs of two cores.
    command = ["java", "-XX:TieredStopAtLevel=1", f"-Dlength={length}", str(source), *urls]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(patience(60)):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().splitlines()


async def test_javas_client_gets_its_answers_from_router_and_services(tmp_path):
    async with fleet(EngineDouble("w0")) as (router, _, _), served() as client, await client() as probe:
        host, port = probe.writer.get_extra_info("peername")
        url = str(router.base_url).rstrip("/")
        lines = await said(tmp_path, f"{url}/v1/chat/completions", f"{url}/v1/route", f"http://{host}:{port}/x")
    assert [line.partition(" ")[0] for line in lines] == ["200"] * 9, lines
    assert lines[2] == "200 data: [DONE]"
    lengths = [line.split()[1] for line in lines[6:]]
    assert lengths == ["100103", "100103", "100102"], "the whole body of each"
