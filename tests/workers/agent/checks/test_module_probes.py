"""What an engine does with adapters on each kind of module is measured once, and goes before its table."""

import json

import httpx
import pytest

from tests.contract.numerics import MLP, make_partial_adapter
from tests.patience import until
from tests.workers.running import RunningWorker, code, metadata_of, post
from workers.agent.checks.module_probes import probe_kinds
from workers.engines.vllm_tables import vllm_table
from workers.verification.base_model import EngineFacts, base_model
from workers.wire import MeasuredModules

ADAPTER = "sql-expert/v1"
LAYERS = 4
LINEAR = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip


async def measured(client: httpx.AsyncClient) -> MeasuredModules:
    """The engine's table, once all of it is measured."""
    found: list[MeasuredModules] = []

    async def is_complete() -> bool:
        table = (await metadata_of(client)).lora.measured
        if table is not None and not table.pending:
            found.append(table)
        return bool(found)

    await until(is_complete, what="all kinds of modules are measured")
    return found[0]


async def engine_requests(client: httpx.AsyncClient) -> float:
    url = (await metadata_of(client)).transport.engine_url
    async with httpx.AsyncClient(timeout=30) as engine:
        page = (await engine.get(f"{url}/metrics")).text
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith("vllm:request_success_total")
    )


def flags_of(*words: str) -> tuple[str, ...]:
    return ("--probe-modules", "always", "--engine-args", json.dumps(words))


@pytest.mark.fleet
async def test_each_kind_is_measured_once_for_a_version_model_and_command(worker):
    flags = flags_of("--sim-uncalled", "o_proj", "down_proj")
    async with worker.inside(*flags) as client:
        table = await measured(client)
        idle = {"model.layers.#.self_attn.o_proj", "model.layers.#.mlp.down_proj"}
        assert {kind for kind, outcome in table.outcomes.items() if outcome == "no effect"} == idle
        works = {kind.partition("#.")[2] for kind, outcome in table.outcomes.items() if outcome == "works"}
        assert works == LINEAR - {"self_attn.o_proj", "mlp.down_proj"}
        assert table.outcomes["model.embed_tokens"] == "refused"
        assert table.seconds > 0
        lora = (await metadata_of(client)).lora
        assert (lora.loaded_loras, lora.capacity.loaded_count) == ((), 0), "no probe is left"
        assert table.engine_version == (await metadata_of(client)).engine_version
    async with worker.inside(*flags) as client:
        assert await measured(client) == table
        assert await engine_requests(client) == 0, "it was kept"
        answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert answer["ignored_modules"]["count"] == 2 * LAYERS
    async with worker.inside(*flags_of("--sim-uncalled", "o_proj")) as client:
        assert (await measured(client)).flags != table.flags


async def test_what_is_measured_counts_for_adapters_that_are_loaded_already_and_refuses_further_ones(
    agent_model, tmp_path
):
    for name in ("first", "second"):
        make_partial_adapter(tmp_path / "adapters", name, rank=8, modules=MLP)
    worker = RunningWorker(agent_model, tmp_path / "adapters", tmp_path / "worker", "--engine", "sim")
    # No canary and no report: nothing but the measured table says it.
    flags = ("--probe-modules", "always", "--canary", "off")
    async with worker.together(*flags, engine=("--sim-uncalled", *MLP)) as client:
        await post(client, "load_lora", lora_id="first")
        await measured(client)

        async def is_unloaded() -> bool:
            return all(lora.state == "failed" for lora in (await metadata_of(client)).lora.loaded_loras)

        await until(is_unloaded, what="the loaded adapter is judged again")
        refused = await post(client, "load_lora", lora_id="second")
        assert (refused.status_code, code(refused)) == (422, "modules_unmatched")
        assert "change no answer of this engine" in refused.json()["error"]["message"]


async def test_a_table_in_which_no_kind_works_decides_nothing(worker):
    every = [name.partition(".")[2] for name in LINEAR]
    async with worker.together(
        "--probe-modules", "always", "--canary", "off", engine=("--sim-uncalled", *every)
    ) as client:
        await measured(client)
        assert (await post(client, "load_lora", lora_id=ADAPTER)).is_success


async def test_an_engine_is_measured_by_the_setting_alone(worker):
    async with worker.together("--probe-modules", "off") as client:
        assert (await metadata_of(client)).lora.measured is None


def test_kinds_are_the_modules_that_text_reaches():
    weights = {
        "model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.self_attn.q_proj": (64, 64),
        "model.layers.2.self_attn.q_proj": (64, 64), "model.layers.0.mlp.experts.0.w1": (64, 64),
        "vision_tower.layers.0.q_proj": (64, 64), "model.norm": (64,),
    }  # fmt: skip
    base = base_model({"architectures": ["LlamaForCausalLM"]}, weights, facts=EngineFacts(table=vllm_table("0.32")))
    kinds = probe_kinds(base)
    first_and_last = {f"model.layers.{number}.self_attn.q_proj": (64, 64) for number in (0, 2)}
    assert kinds == {"model.layers.#.self_attn.q_proj": first_and_last}
    unknown = base_model({"architectures": ["NewForCausalLM"]}, weights, facts=EngineFacts(table=vllm_table("0.32")))
    assert probe_kinds(unknown).keys() == {"model.layers.#.self_attn.q_proj", "layers.#.self_attn.q_proj"}
