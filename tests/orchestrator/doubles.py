"""A worker's agent and engine in one small server: slots, digests, and failures on demand."""

import asyncio
import hashlib

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from lorafleet.engine.worker_proofs import ProvedAgent, proof_of
from lorafleet.identity import engine_name
from lorafleet.keys.key_files import hash_key, key_id_of
from lorafleet.service.http import envelope
from workers.report_header import ReportHeaderMiddleware
from workers.wire import WORKER_PROOF_PATH, ProofRequest


def digest_of(source):
    """The digest of a source, whose content is its own URL here; one of the fleet's own bytes names it."""
    if source.startswith("fleet:"):
        return source.rpartition("/")[2].removeprefix("fleet:")
    return hashlib.sha256(source.encode()).hexdigest()


EMPTY_DISK = {"disk_id": "disk-w0", "since": 0, "upto": 0}


class FakeAgent:
    """Holds up to `slots` adapters. `fail_calls`: numbers of the action calls that answer 503 instead of acting.

    `made` may be one list of several agents: all their calls in order, of which the `fail_made`-th fails.
    """

    def __init__(
        self, worker_id, *, slots=4, base_model="tiny-qwen", max_lora_rank=64, zone="", node="", dialect="vllm"
    ):
        self.worker_id = worker_id
        self.dialect = dialect
        self.slots = slots
        self.base_model = base_model
        self.max_lora_rank = max_lora_rank
        self.refusal = ""
        self.punica = ""
        self.zone = zone
        self.node = node
        self.state = "ready"
        self.url = ""
        self.key = ""
        self.loaded = {}
        self.configured = {}  # lora_id -> adapter that the worker's settings name
        self.calls = []
        self.claims = []
        self.refused = []
        self.epochs = []
        self.fail_calls = set()
        self.made = []
        self.fail_made = 0
        self.refuse = {}
        self.forbidden = set()  # sources
        self.answers: dict[str, bytes] = {}  # verb -> the body of a 422 in place of doing it
        self.ranks = {}
        self.weight_changes: dict[str, float] = {}  # source -> its largest change of a module
        self.effects: dict[str, dict] = {}  # lora_id -> what the engine does with it, as fields of the adapter
        self.pins: dict[str, str] = {}  # source -> where those very bytes are, as of now
        self.files: dict[str, dict[str, bytes]] = {}  # digest -> name -> content
        self.disk: dict[str, bool] = {}  # digest -> whether it is kept
        self.disk_id = f"disk-{worker_id}"
        self.ranges = []
        self.running = 0
        self.engine_boot_id = "e1"
        self.agent_boot_id = "a1"
        self.numbers_reports = True  # False: an older agent
        self.changes = 1
        self.hold_loads = None
        self.hold_unloads = None
        self.load_s = 0.0
        self.loading = {}
        self.has_called = asyncio.Event()
        self.epoch = 0
        self.drained = False
        self.app = self._app()

    def start_anew(self):
        """Reset the agent to its initial state, at the same address."""
        url, key, boot_id = self.url, self.key, f"{self.agent_boot_id}+"
        self.__init__(self.worker_id, slots=self.slots)
        self.url, self.key, self.agent_boot_id = url, key, boot_id

    def put(self, lora_id, source, *, loaded_at="2020-01-01T00:00:00Z"):
        """Put an adapter on the worker without a call."""
        digest = digest_of(source)
        self.changes += 1
        self.disk.setdefault(digest, False)
        self.loaded[lora_id] = {
            "lora_id": lora_id,
            "digest": digest,
            "engine_name": engine_name(lora_id, digest),
            "state": "ready",
            "location": "device",
            "rank": self.ranks.get(source, 8),
            "base_model": self.base_model,
            "source": source,
            "size_bytes": 1000,
            "loaded_at": loaded_at,
            **self.effects.get(lora_id, {}),
        }
        return self.loaded[lora_id]

    def put_foreign(self, name, source):
        """Load an adapter into the engine as another client does; the agent has read its files."""
        ours = dict(self.loaded)
        lora = self.put(name, source)
        self.loaded = ours
        self.loaded[f"{name}@"] = lora | {"digest": "", "engine_name": name, "files_digest": lora["digest"]}

    def configure(self, lora_id, source, **fields):
        """Name an adapter in the worker's settings, in a folder of its disk, without loading it."""
        adapter = {"lora_id": lora_id, "digest": digest_of(source), "rank": 8, "size_bytes": 1000, "source": source}
        self.configured[lora_id] = adapter | {"is_configured": True, **fields}
        self.changes += 1

    @property
    def report_number(self):
        return self.changes if self.numbers_reports else 0

    def operations(self):
        return [(verb, body.get("lora_id")) for verb, body in self.calls]

    def proof(self, asked):
        """The answer to a request for a proof, by the agent's own key."""
        key_hash = hash_key(self.key)
        agent = ProvedAgent(self.worker_id, self.agent_boot_id, key_id_of(key_hash))
        said = {"instance_id": agent.instance_id, "agent_boot_id": agent.agent_boot_id, "key_id": agent.key_id}
        return said | {"proof": proof_of(key_hash, ProofRequest.model_validate(asked), agent)}

    def metadata(self):
        return {
            "instance_id": self.worker_id,
            "state": self.state,
            "is_drain_ordered": self.drained,
            "agent_url": self.url,
            "zone": self.zone,
            "node": self.node,
            "model": {
                "name": self.base_model,
                "base_model": self.base_model,
                "runtime_config": {
                    "block_size": 16,
                    "total_kv_blocks": 64,
                    "max_num_seqs": 8,
                    "max_num_batched_tokens": 2048,
                    "max_model_len": 2048,
                },
            },
            "transport": {"engine_url": self.url, "dialect": self.dialect},
            "lora": {
                "enabled": not self.refusal,
                "refusal": self.refusal,
                "punica": self.punica,
                "max_loras": 2,
                "max_cpu_loras": self.slots,
                "max_lora_rank": self.max_lora_rank,
                "configured_digest": self.configured_digest,
                "loaded_loras": [*self.loaded.values(), *self.loading.values()],
                "capacity": {
                    "loaded_count": len(self.loaded) + len(self.loading),
                    "available_slots": self.slots - len(self.loaded) - len(self.loading),
                    "device_slots": 2,
                    "host_slots": self.slots,
                },
            },
            "load": {"running": self.running},
            "agent_boot_id": self.agent_boot_id,
            "engine_boot_id": self.engine_boot_id,
            "epoch": self.epoch,
        } | ({"report_number": self.report_number} if self.numbers_reports else {})

    @property
    def configured_digest(self):
        return hashlib.sha256(repr(sorted(self.configured.items())).encode()).hexdigest() if self.configured else ""

    def heartbeat(self):
        held, kept = ([name for name, is_kept in self.disk.items() if is_kept is wanted] for wanted in (False, True))
        files = {"disk_id": self.disk_id, "since": 0, "upto": len(self.disk), "held": held, "kept": kept}
        return {"metadata": self.metadata(), "files": files}

    async def _list_files(self, digest: str):
        if digest not in self.files:
            return JSONResponse(envelope(404, "files_not_found", "not here"), 404)
        listed = [{"name": name, "size_bytes": len(content)} for name, content in self.files[digest].items()]
        return {"digest": digest, "files": listed}

    async def _file(self, digest: str, name: str, request: Request):
        self.ranges.append(request.headers.get("range"))
        return Response(self.files[digest][name], headers={"etag": f'"{digest}"', "x-inner": "not passed on"})

    async def _loras(self, configured: bool, limit: int, cursor: str):
        names = [name for name in sorted(self.configured) if name > cursor]
        more = names[limit - 1] if len(names) > limit else None
        page = [self.configured[name] for name in names[:limit]]
        return {"data": page, "available_loras": page, "loaded_loras": [], "capacity": {}, "next": more}

    async def _check_source(self, source: str):
        if source in self.forbidden:
            return JSONResponse(envelope(422, "source_forbidden", f"source {source!r}: outside the folders"), 422)
        return Response(status_code=204)

    def _app(self):
        app = FastAPI()

        @app.get("/metadata")
        async def metadata():
            return self.metadata()

        @app.post(WORKER_PROOF_PATH)
        async def prove(asked: dict):
            return self.proof(asked)

        @app.get("/health")
        async def health():
            return {}

        @app.get("/v1/models")
        async def models():
            return {"data": [{"id": lora["engine_name"]} for lora in self.loaded.values()]}

        app.add_api_route("/v1/metadata/loras", self._loras)
        app.add_api_route("/v1/admin/source", self._check_source)
        app.add_api_route("/v1/files/{digest}", self._list_files)
        app.add_api_route("/v1/files/{digest}/{name}", self._file)

        @app.post("/v1/admin/claim")
        async def claim(request: Request):
            epoch = int(request.headers["x-lorafleet-epoch"])
            if epoch < self.epoch:
                return JSONResponse(envelope(409, "stale_epoch", f"epoch {epoch} is over"), 409)
            self.epoch = epoch
            self.claims.append(epoch)
            return self.metadata()

        @app.post("/v1/admin/{verb}")
        async def act(verb: str, request: Request):
            body = await request.json()
            if int(request.headers["x-lorafleet-epoch"]) < self.epoch:
                self.refused.append((verb, body))
                return JSONResponse(envelope(409, "stale_epoch", "another one leads"), 409)
            self.calls.append((verb, body))
            self.has_called.set()
            self.epochs.append(int(request.headers["x-lorafleet-epoch"]))
            self.made.append((verb, body))
            if len(self.calls) in self.fail_calls or len(self.made) == self.fail_made:
                return JSONResponse(envelope(503, "engine_unreachable", "the call that had to fail"), 503)
            if verb in self.answers:
                return Response(self.answers[verb], 422, media_type="application/json")
            if body.get("lora_id") in self.refuse:
                code = self.refuse[body["lora_id"]]
                message = f"{code} by the double: source {body.get('source')!r}"
                return JSONResponse(envelope(422, code, message), 422)
            return await getattr(self, verb)(body)

        app.add_middleware(ReportHeaderMiddleware, as_of=lambda: f"{self.agent_boot_id}/{self.report_number}")
        return app

    async def mark_files(self, body):
        self.changes += 1
        for digest in body["digests"]:
            if body["mark"] == "gone":
                self.disk.pop(digest, None)
            elif body["mark"] == "kept" or digest in self.disk:
                self.disk[digest] = body["mark"] == "kept"
        return Response(status_code=204)

    async def inspect_lora(self, body):
        digest = digest_of(body["source"])
        self.disk.setdefault(digest, False)
        self.changes += 1
        rank = self.ranks.get(body["source"], 8)
        return {
            "lora_id": body["lora_id"],
            "path": f"/cache/{digest}",
            "base_model": body.get("base_model") or self.base_model,
            "rank": rank,
            "alpha": 2.0 * rank,
            "target_modules": ["q_proj", "v_proj"],
            "dtype": "BF16",
            "digest": digest,
            "size_bytes": 1000,
            "source": body["source"],
            "pinned_source": self.pins.get(body["source"], body["source"]),
            "weight_change": self.weight_changes.get(body["source"], 0.0),
            "weight_change_in": "layers.0.q_proj" if body["source"] in self.weight_changes else "",
        }

    async def load_lora(self, body):
        if body.get("only_files"):
            return (await self.inspect_lora(body)) | {"state": "on_disk"}
        if self.hold_loads is not None:
            await self.hold_loads.wait()
        if self.load_s:
            self.loading[body["lora_id"]] = {
                "lora_id": body["lora_id"],
                "digest": body["digest"],
                "engine_name": engine_name(body["lora_id"], body["digest"]),
                "state": "loading",
                "location": "disk",
            }
            await asyncio.sleep(self.load_s)
            del self.loading[body["lora_id"]]
        pinned = {pin: source for source, pin in self.pins.items()}
        assert digest_of(pinned.get(body["source"], body["source"])) == body["digest"]
        if len(self.loaded) >= self.slots and body.get("evict"):
            self.loaded = {name: it for name, it in self.loaded.items() if it["engine_name"] != body["evict"]}
        if body["lora_id"] not in self.loaded and len(self.loaded) >= self.slots:
            return JSONResponse(envelope(409, "no_free_slot", "full"), 409)
        return self.put(body["lora_id"], body["source"])

    async def unload_lora(self, body):
        if self.hold_unloads is not None:
            await self.hold_unloads.wait()
        key = f"{body['engine_name']}@" if "engine_name" in body else body["lora_id"]
        held = self.loaded.get(key)
        if held is None or body.get("digest") not in (None, held["digest"]):
            return {}
        del self.loaded[key]
        self.changes += 1
        return {}

    async def drain(self, body):
        self.drained = True
        self.state = "draining"
        self.changes += 1
        return {}

    async def undrain(self, body):
        self.drained = False
        self.state = "ready"
        self.changes += 1
        return self.metadata()
