"""A stub fleet in one process: any number of engines, and the orchestrator and agents that a router asks of them.

python -m benchmarks.relay.fleet SPEC, where SPEC is a Spec as JSON. Prints one line, {"control": port, "engines":
[port, ...]}, and serves until its standard input ends. The engines compute nothing and are as cheap as can be: what
a router costs beside them is its own. The control plane speaks through the real wire types.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import uvloop

from benchmarks.relay.prompts import BASE, PACE_PER_S, long_new, long_seen, of_length, shape, short, short_new
from benchmarks.relay.wiring import NOT_FOUND, Answering, free_port, piece, streamed, whole
from benchmarks.scenes import BLOCK_SIZE, digest, engine_name, lora_id, worker_id
from lorafleet.identity import KV_HASHING, block_hashes, root_hash
from lorafleet.tokenizer.chat import ChatTokenizer, read_files
from orchestrator.model.catalog import Catalog, CatalogAdapter, CatalogWorker
from orchestrator.model.changes import reader_of
from orchestrator.model.usage import LimitShares, UsageAnswer
from workers.wire import (
    KvFrame,
    KvRank,
    KvSnapshot,
    Load,
    LoraInfo,
    Metadata,
    ModelCard,
    ModelFiles,
    RuntimeConfig,
    Transport,
    WorkerAdapter,
    pack_hashes,
)


class Spec(msgspec.Struct):
    """A fleet.

    adapters   that the catalog knows
    resident   of these, on every worker: the first so many
    blocks     that the engines have cached together, beside the prompts that are asked for
    lengths_kb   of seen prompts of which the engines have cached the beginnings
    has_events   the engines publish what they have cached; if not, a router can only estimate it
    prefill_tokens_per_s, answer_after_s   the speed that engines report, and when they answer a request that is not
                 streamed; by default they are so fast that no request waits
    """

    workers: int
    model_dir: str = ""
    adapters: int = 10
    resident: int = 10
    blocks: int = 0
    lengths_kb: tuple[int, ...] = ()
    has_events: bool = True
    prefill_tokens_per_s: float = 2e6
    answer_after_s: float = 0.0


# --- engines ----------------------------------------------------------------------------------------------------------

# Room for the longest prompts that are asked.
MAX_MODEL_LEN = 1 << 20
_MODEL = re.compile(rb'"model":\s*"([^"]*)"')
# A peer sends the newer of the two names on.
_CHUNKS = re.compile(rb'"max(?:_completion)?_tokens":\s*(\d+)')
_USAGE = re.compile(rb"cached=(\d+)/(\d+);")
_PACED = re.compile(rb'"seed":\s*1\b')
_EVENTS_HEAD = streamed("text/event-stream; charset=utf-8")
_NAMED = b'{"id":"chatcmpl-5f0c6e1d2b3a49788c1d","object":"%s","created":1790000000,"model":"%s",'
_DELTA = b'"choices":[{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}]}'
_TOLD = (
    b'"usage":{"prompt_tokens":%s,"total_tokens":%s,"completion_tokens":20,'
    b'"prompt_tokens_details":{"cached_tokens":%s}}'
)
_TEXT = b"The quick brown fox jumps over the lazy dog and then has a rest."
_MESSAGE = (
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"logprobs":null,"finish_reason":"stop"}],'
)


class StubEngine:
    """One engine's routes."""

    def __init__(self, tokenizer: ChatTokenizer, pacer: "Pacer", answer_after_s: float) -> None:
        self._tokenizer = tokenizer
        self._pacer = pacer
        self._answer_after_s = answer_after_s
        self._loop = asyncio.get_running_loop()

    def __call__(self, asked: Answering) -> None:
        if asked.path == b"/v1/chat/completions":
            self._complete(asked)
        elif asked.path == b"/tokenize":
            asked.transport.write(self._tokenized(asked.body))
        else:
            asked.transport.write(_ASIDE.get(asked.path, NOT_FOUND))

    def _complete(self, asked: Answering) -> None:
        body = asked.body
        named, usage = _MODEL.search(body), _USAGE.search(body)
        model = named[1] if named else BASE.encode()
        cached, prompt = usage.groups() if usage else (b"0", b"1")
        if b'"stream":true' not in body:
            answer = _whole_answer(model, prompt, cached)
            if self._answer_after_s:
                self._loop.call_later(self._answer_after_s, asked.transport.write, answer)
            else:
                asked.transport.write(answer)
            return
        chunks = _CHUNKS.search(body)
        first, chunk, last = _stream_answer(model, prompt, cached, b'"include_usage":true' in body)
        stream = StubStream(asked, chunk, int(chunks[1]) if chunks else 1, last)
        asked.transport.write(first)
        if _PACED.search(body):
            stream.step()
            self._pacer.add(stream)
        else:
            stream.burst()

    def _tokenized(self, body: bytes) -> bytes:
        try:
            asked = json.loads(body)
            text, special = self._tokenizer.prompt_text(asked)
            ids = self._tokenizer.encode(text, add_special_tokens=special)
        except ValueError as exc:
            return whole(json.dumps({"error": {"message": str(exc)}}).encode(), status="400 Bad Request")
        return whole(json.dumps({"tokens": ids, "count": len(ids), "max_model_len": MAX_MODEL_LEN}).encode())


_ASIDE = {
    b"/health": whole(b""),
    b"/v1/models": whole(
        json.dumps(
            {"object": "list", "data": [{"id": BASE, "object": "model", "max_model_len": MAX_MODEL_LEN}]}
        ).encode()
    ),
    b"/metrics": whole(b"", kind="text/plain"),
}


@cache
def _whole_answer(model: bytes, prompt: bytes, cached: bytes) -> bytes:
    """About 450 bytes, the same object each time: no engine could be cheaper."""
    named = _NAMED % (b"chat.completion", model)
    return whole(named + _MESSAGE % _TEXT + _TOLD % (prompt, prompt, cached) + b"}")


@cache
def _stream_answer(model: bytes, prompt: bytes, cached: bytes, tells: bool) -> tuple[bytes, bytes, bytes]:
    """(head and first event, one chunk, all that follows the last chunk); an event is an HTTP chunk, as in vLLM."""

    def event(rest: bytes) -> bytes:
        return piece(b"data: " + _NAMED % (b"chat.completion.chunk", model) + rest + b"\n\n")

    first = event(_DELTA % (b'"role":"assistant","content":""', b"null"))
    last = event(_DELTA % (b"", b'"stop"'))
    if tells:
        last += event(b'"choices":[],' + _TOLD % (prompt, prompt, cached) + b"}")
    chunk = event(_DELTA % (b'"content":" token"', b"null"))
    return _EVENTS_HEAD + first, chunk, last + piece(b"data: [DONE]\n\n") + piece(b"")


class StubStream:
    """One streamed answer on its way. A client that left gets no more of it."""

    def __init__(self, asked: Answering, chunk: bytes, left: int, last: bytes) -> None:
        self._asked = asked
        self._chunk = chunk
        self._left = left
        self._last = last
        self._again = asyncio.get_running_loop().call_soon

    def step(self) -> bool:
        """Write the next chunk; whether there are more."""
        if self._asked.is_gone:
            return False
        self._left -= 1
        if self._left > 0:
            self._asked.transport.write(self._chunk)
            return True
        self._asked.transport.write(self._chunk + self._last)
        return False

    def burst(self) -> None:
        """Each chunk by itself, as fast as the loop goes round: what is written in one turn would be one packet."""
        if self.step():
            self._again(self.burst)


class Pacer:
    """Paced streams, spread over the slots of a wheel that turns `PACE_PER_S` times a second: no timer a stream."""

    def __init__(self) -> None:
        self._slots: list[list[StubStream]] = [[] for _ in range(1000 // PACE_PER_S)]
        self._at = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def add(self, stream: StubStream) -> None:
        """The slot that was served last: its next turn is a whole one away."""
        self._slots[(self._at - 1) % len(self._slots)].append(stream)

    async def run(self) -> None:
        while True:
            due = int((self._loop.time() - self._began) * 1000)
            # One that fell far behind does not make up for it: chunks would come in bursts.
            self._at = max(self._at, due - len(self._slots))
            while self._at < due:
                slot = self._at % len(self._slots)
                self._at += 1
                self._slots[slot] = [stream for stream in self._slots[slot] if stream.step()]
            await asyncio.sleep(0.001)


# --- orchestrator and agents ------------------------------------------------------------------------------------------

_MSGPACK = "application/vnd.msgpack"
# Keep-alives of ledgers come each second, those of events each 15 s: the defaults of agents and orchestrator.
_BEAT_S, _BEATS_OF_EVENTS = 1.0, 15
_EPOCH = "stub.1"


class StubControlPlane:
    """What a router asks of an orchestrator and of agents. Nothing ever changes, so every answer is made beforehand."""

    def __init__(self, spec: Spec, port: int, engines: list[int], files: dict[str, str]) -> None:
        url = f"http://127.0.0.1:{port}"
        workers = [worker_id(i) for i in range(spec.workers)]
        self._etag = b'"1"'
        self._followers: dict[str, list[Answering]] = {"sse": [], "kv": []}
        usage = msgspec.json.encode(UsageAnswer(accepted=True, revision=1, limits=LimitShares(idle_share=1.0)))
        model_files = ModelFiles(base_model=BASE, files=files).model_dump_json().encode()
        self._answers = {
            b"/v1/catalog": whole(reader_of(Catalog).dump_json(_catalog(spec, url)), more='etag: "1"\r\n'),
            b"/v1/usage": whole(usage),
        }
        snapshots = _snapshots(spec, ChatTokenizer.from_files(files))
        for worker, engine, snapshot in zip(workers, engines, snapshots, strict=True):
            told = _metadata(spec, worker, f"{url}/agents/{worker}", engine).model_dump_json().encode()
            agent = f"/agents/{worker}".encode()
            self._answers |= {
                agent + b"/metadata": whole(told),
                agent + b"/v1/model/files": whole(model_files),
                agent + b"/v1/kv/snapshot": whole(snapshot, kind=_MSGPACK),
                agent + b"/v1/usage": whole(usage),
            }

    def __call__(self, asked: Answering) -> None:
        path = asked.path.partition(b"?")[0]
        if path == b"/v1/catalog" and asked.condition == self._etag:
            asked.transport.write(b'HTTP/1.1 304 Not Modified\r\netag: "1"\r\n\r\n')
        elif path.endswith(b"/v1/events"):
            self._follow(asked, "sse", streamed("text/event-stream") + piece(b": here\n\n"))
        elif path.endswith(b"/v1/kv/stream"):
            self._follow(asked, "kv", streamed(_MSGPACK) + _beat())
        else:
            asked.transport.write(self._answers.get(path, NOT_FOUND))

    def _follow(self, asked: Answering, kind: str, first: bytes) -> None:
        asked.transport.write(first)
        self._followers[kind].append(asked)

    async def run(self) -> None:
        """Signs of life to whoever follows."""
        for number in count():
            await asyncio.sleep(_BEAT_S)
            beats = {"kv": _beat()} | ({} if number % _BEATS_OF_EVENTS else {"sse": piece(b": here\n\n")})
            for kind, beat in beats.items():
                left = [follower for follower in self._followers[kind] if not follower.is_gone]
                self._followers[kind] = left
                for follower in left:
                    follower.transport.write(beat)


def _beat() -> bytes:
    frame = msgspec.msgpack.encode(KvFrame(0, 0.0))
    return piece(len(frame).to_bytes(4, "big") + frame)


def _catalog(spec: Spec, url: str) -> Catalog:
    return Catalog(
        revision=1,
        adapters=tuple(
            CatalogAdapter(lora_id=lora_id(n), digest=digest(n), base_model=BASE, source="file:///a")
            for n in range(spec.adapters)
        ),
        workers=tuple(
            CatalogWorker(id=worker_id(i), agent_url=f"{url}/agents/{worker_id(i)}", state="ready")
            for i in range(spec.workers)
        ),
    )


def _metadata(spec: Spec, worker: str, agent_url: str, engine: int) -> Metadata:
    """An engine so large that nothing waits in the router, unless the spec's speed makes it wait."""
    shape_ = RuntimeConfig(
        block_size=BLOCK_SIZE,
        total_kv_blocks=10_000_000,
        max_num_seqs=8192,
        max_num_batched_tokens=65_536,
        max_model_len=MAX_MODEL_LEN,
    )
    held = tuple(
        WorkerAdapter(
            lora_id=lora_id(n),
            digest=digest(n),
            engine_name=engine_name(n),
            state="ready",
            location="device",
            rank=16,
            base_model=BASE,
            loaded_at="2026-01-01T00:00:00Z",
        )
        for n in range(spec.resident)
    )
    return Metadata(
        instance_id=worker,
        agent_url=agent_url,
        model=ModelCard(name=BASE, base_model=BASE, runtime_config=shape_),
        transport=Transport(engine_url=f"http://127.0.0.1:{engine}", kv_ledger=KV_HASHING if spec.has_events else 0),
        lora=LoraInfo(enabled=True, max_loras=64, max_cpu_loras=128, max_lora_rank=64, loaded_loras=held),
        load=Load(
            prefill_tokens_per_s=spec.prefill_tokens_per_s,
            token_s=1e-5,
            mean_output_tokens=20.0,
            mean_request_s=max(0.001, spec.answer_after_s),
        ),
        agent_boot_id="a",
        engine_boot_id="e",
    )


def _snapshots(spec: Spec, tokenizer: ChatTokenizer) -> list[bytes]:
    """What each engine has: the beginnings that the prompts share, under every adapter, and blocks of other prompts."""
    known: set[int] = set()
    kinds = (short(), short_new(), long_seen(), long_new(), *(of_length(kb, is_new=False) for kb in spec.lengths_kb))
    for kind in kinds:
        shared = shape(kind, tokenizer).shared
        for name in ("", *map(engine_name, range(spec.resident))):
            known.update(block_hashes(shared, block_size=BLOCK_SIZE, root=root_hash(BASE, name)))
    rng = Random(3)
    packed = []
    for _ in range(spec.workers):
        others = [rng.getrandbits(64) for _ in range(spec.blocks // spec.workers)]
        rank = KvRank(0, device=pack_hashes([*known, *others]))
        packed.append(msgspec.msgpack.encode(KvSnapshot(_EPOCH, 0, BASE, BLOCK_SIZE, (rank,))))
    return packed


# --- the process ------------------------------------------------------------------------------------------------------


async def _serve(spec: Spec) -> None:
    loop = asyncio.get_running_loop()
    files = read_files(Path(spec.model_dir))
    pacer = Pacer()
    engine = StubEngine(ChatTokenizer.from_files(files), pacer, spec.answer_after_s)

    async def listen(answer: Callable[[Answering], None], port: int = 0) -> int:
        listening = await loop.create_server(partial(Answering, answer), "127.0.0.1", port, backlog=4096)
        taken: int = listening.sockets[0].getsockname()[1]
        return taken

    engines = [await listen(engine) for _ in range(spec.workers)]
    # What it answers has its port in it.
    port = free_port()
    plane = StubControlPlane(spec, port, engines, files)
    control = await listen(plane, port)
    print(json.dumps({"control": control, "engines": engines}), flush=True)
    beats = [asyncio.create_task(pacer.run()), asyncio.create_task(plane.run())]
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    for beat in beats:
        beat.cancel()


if __name__ == "__main__":
    uvloop.run(_serve(msgspec.json.decode(sys.argv[1], type=Spec)))
