"""What the documents ask of a request: its fields, its route to a worker, its answer."""

import pytest

from tests.founding.conftest import ACME, LEGAL, PYTHON, SQL, FoundingFleet, models

pytestmark = pytest.mark.fleet


def test_lora_id_answers_by_the_adapter_and_no_lora_id_by_the_base_model(fleet: FoundingFleet) -> None:
    adapter, base = fleet.chat(lora_id=SQL), fleet.chat()
    assert adapter.headers["x-lorafleet-adapter"].startswith(f"{SQL}@")
    assert base.headers["x-lorafleet-adapter"] == "base"
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (adapter, base)]
    assert texts[0] != texts[1]


def test_model_may_name_the_adapter(fleet: FoundingFleet) -> None:
    answer = fleet.chat(model=SQL)
    assert answer.json()["model"] == SQL
    assert answer.headers["x-lorafleet-adapter"].startswith(f"{SQL}@")


def test_openais_client_sends_lora_path_as_extra_body(fleet: FoundingFleet) -> None:
    from openai import OpenAI  # a second to import

    client = OpenAI(base_url=f"{fleet.router}/v1", api_key=fleet.keys["admin"])
    answer = client.chat.completions.with_raw_response.create(
        model="tiny-qwen",
        messages=[{"role": "user", "content": "Translate to Spanish: Hello"}],
        max_tokens=4,
        extra_body={"lora_path": LEGAL},
    )
    assert answer.headers["x-lorafleet-adapter"].startswith(f"{LEGAL}@")
    assert answer.parse().choices[0].message.content


def test_generate_answers_a_text_by_an_adapter_and_a_batch_by_several(fleet: FoundingFleet) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0}
    one = fleet.post(
        f"{fleet.router}/generate", {"text": "Hello", "lora_path": SQL, "sampling_params": sampling}
    ).json()
    body = {"text": ["Hello"] * 3, "lora_path": [SQL, LEGAL, None], "sampling_params": sampling}
    batch = fleet.post(f"{fleet.router}/generate", body).json()
    assert batch[0]["text"] == one["text"]
    assert len({item["text"] for item in batch}) == 3


def test_generate_takes_folders_as_lora_path(fleet: FoundingFleet) -> None:
    folders = [fleet.get(f"{fleet.orchestrator}/v1/adapters/{name}")["spec"]["source"] for name in (SQL, PYTHON)]
    sampling = {"max_new_tokens": 4, "temperature": 0}

    def texts(lora_path: list[str]) -> list[str]:
        body = {"text": ["Hello"] * 2, "lora_path": lora_path, "sampling_params": sampling}
        return [item["text"] for item in fleet.post(f"{fleet.router}/generate", body).json()]

    assert texts(folders) == texts([SQL, PYTHON])


def test_name_of_no_adapter_is_refused_and_never_answered_by_the_base_model(fleet: FoundingFleet) -> None:
    for field in ("lora_id", "lora_path", "model"):
        answer = fleet.chat(**{field: "nobody/v1"})
        assert (answer.status_code, fleet.code(answer)) == (404, "model_not_found")
    answer = fleet.chat(lora_adapter=SQL)
    assert answer.status_code == 400
    assert "lora_id" in answer.json()["error"]["message"]


def test_request_goes_only_to_a_worker_that_has_the_adapter_loaded(fleet: FoundingFleet) -> None:
    for lora_id in (SQL, LEGAL):
        held = fleet.ensure(lora_id)
        for number in range(4):
            answer = fleet.chat(lora_id=lora_id, prompt=f"{lora_id} {number}")
            assert answer.headers["x-lorafleet-worker"] in {*held, *fleet.fleet.held_by(lora_id)}


def test_same_prompt_under_another_adapter_reuses_no_block(fleet: FoundingFleet) -> None:
    prompt = "the same long prompt for each adapter " * 30

    def cached(**body: str) -> int:
        answer = fleet.chat(prompt=prompt, **body).json()
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(lora_id=SQL) == 0
    assert cached(lora_id=LEGAL) == 0
    assert cached() == 0
    assert cached(lora_id=SQL) > 0


def test_adapter_loaded_nowhere_is_loaded_when_first_asked_for(fleet: FoundingFleet) -> None:
    answer = fleet.chat(lora_id=ACME, key="acme")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lorafleet-adapter"].startswith(f"{ACME}@")


def test_models_list_base_model_and_adapters_with_their_parent(fleet: FoundingFleet) -> None:
    listed = models(fleet)
    assert {SQL, PYTHON, LEGAL, ACME} < listed.keys()
    assert (listed["tiny-qwen"]["parent"], listed[SQL]["parent"]) == (None, "tiny-qwen")


def test_route_shows_the_decision_and_each_workers_cost(fleet: FoundingFleet) -> None:
    fleet.ensure(SQL)
    body = {"model": "tiny-qwen", "lora_id": SQL, "messages": [{"role": "user", "content": "hi"}]}
    answer = fleet.post(f"{fleet.router}/v1/route", body).json()
    assert answer["worker_id"] in fleet.fleet.held_by(SQL)
    assert [row["worker_id"] for row in answer["scores"] if row["winner"]] == [answer["worker_id"]]
    assert all({"prefill_s", "adapter_s", "queue_s", "cost_s"} <= row.keys() for row in answer["scores"])
