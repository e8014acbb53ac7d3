"""Adapters of a model that pools, through orchestrator, agents and router: placed, loaded and routed like others."""

import asyncio
import random
import shutil

import pytest

from lorafleet.sim.adapters import read_adapter
from lorafleet.sim.pooling import class_shares, text_vector
from lorafleet.tokenizer.chat import ChatTokenizer
from tests.simulation.fleet import adapter_of
from tests.simulation.programs import EngineFlags

MANY, AT_ONCE = 8, 3
TEXTS = ("The order was late again.", "SELECT name FROM customers", "def main(): pass")


class Classifiers:
    """A fleet of two workers with three slots each, and the folders of its adapters."""

    def __init__(self, fleet, tokenizer, folders):
        self.fleet, self.tokenizer, self.folders = fleet, tokenizer, folders

    @staticmethod
    async def start(simulation, count):
        fleet = await simulation.fleet(workers=2, engine=EngineFlags(more=("--runner", "pooling")))
        await fleet.set_policy(min_residency_s=0.1, reserve_slots=0)
        folders = make_adapters(simulation, count)
        specs = [{"lora_id": name, "source": f"file://{path}"} for name, path in folders.items()]
        answer = (await fleet.http.post("/v1/adapters:batch", json={"adapters": specs})).json()
        assert {row["status"] for row in answer["data"]} == {201}, answer
        return Classifiers(fleet, ChatTokenizer.from_dir(simulation.model), folders)

    def expected(self, adapter, text):
        """What the adapter's engine makes of a text."""
        loaded = read_adapter(1, adapter, str(self.folders[adapter]), max_rank=16)
        return text_vector(loaded, self.tokenizer.completion_ids(text))

    async def post(self, path, body):
        answer = await self.fleet.routers[0].post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer


def make_adapters(simulation, count):
    """Adapters with other bytes each."""
    first = simulation.adapter("class-0", rank=1)
    folders = {"class-0": first}
    for number in range(1, count):
        folder = first.with_name(f"class-{number}")
        shutil.copytree(first, folder)
        config = (folder / "adapter_config.json").read_text()
        (folder / "adapter_config.json").write_text(config.replace("{", f'{{\n  "revision": "{number}",', 1))
        folders[folder.name] = folder
    return folders


async def assert_right_labels(made):
    """Each adapter, asked twice and among others, gives its own label for each text."""
    asked = [name for name in made.folders for _ in range(2)]
    random.Random(3).shuffle(asked)
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(name):
        async with free:
            answer = await made.post("/classify", {"lora_id": name, "input": list(TEXTS)})
        body = answer.json()
        shares = [class_shares(made.expected(name, text), 2) for text in TEXTS]
        assert [row["probs"] for row in body["data"]] == [pytest.approx(share) for share in shares], name
        assert [row["label"] for row in body["data"]] == [f"LABEL_{share.index(max(share))}" for share in shares]
        assert (body["model"], adapter_of(answer)) == (name, name)

    await asyncio.gather(*map(ask, asked))


async def test_each_classifier_gives_its_own_labels_while_adapters_make_room_for_each_other(simulation):
    made = await Classifiers.start(simulation, MANY)
    await assert_right_labels(made)
    await assert_other_routes_run_the_adapter(made)
    await assert_a_text_is_predicted_where_its_blocks_are(made)


@pytest.mark.thorough
async def test_two_hundred_classifiers_give_their_own_labels(simulation):
    await assert_right_labels(await Classifiers.start(simulation, 200))


async def assert_other_routes_run_the_adapter(made):
    """Embeddings, pooling, scores and ranks are the adapter's own."""
    name, text = "class-1", TEXTS[0]
    vector = made.expected(name, text)
    embedded = await made.post("/v1/embeddings", {"model": name, "input": text})
    assert embedded.json()["data"][0]["embedding"] == vector
    assert (await made.post("/pooling", {"model": name, "input": text})).json()["data"][0]["data"] == vector
    pairs = [made.expected(name, f"{text}\n{other}")[0] for other in TEXTS]
    scores = [(value + 1) / 2 for value in pairs]
    for path in ("/score", "/v1/score"):
        answer = await made.post(path, {"model": name, "text_1": text, "text_2": list(TEXTS)})
        assert [row["score"] for row in answer.json()["data"]] == scores
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = await made.post(path, {"model": name, "query": text, "documents": list(TEXTS), "top_n": 2})
        best = sorted(range(len(TEXTS)), key=lambda index: -scores[index])[:2]
        assert [row["index"] for row in answer.json()["results"]] == best


async def assert_a_text_is_predicted_where_its_blocks_are(made):
    """A long text that an adapter has seen is predicted as cached for that adapter, and for no other."""
    long = "Classify this order by its words. " * 40
    cached = {}
    for name in ("class-2", "class-2", "class-3"):
        answer = await made.post("/classify", {"lora_id": name, "input": long})
        cached.setdefault(name, []).append(int(answer.headers["x-lorafleet-cached-tokens"]))
    assert cached["class-2"][0] == cached["class-3"][0] == 0
    assert cached["class-2"][1] > 200
