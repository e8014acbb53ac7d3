"""Messages of the agent: what is in them, and what is not."""

from dataclasses import asdict, replace

from pydantic import TypeAdapter

from workers.wire import LoadAnswer, LoraInfo, WorkerAdapter

ADAPTER = WorkerAdapter(
    lora_id="sql/v1",
    digest="d" * 64,
    engine_name="sql/v1@dddd",
    state="ready",
    location="device",
    rank=8,
    is_wanted=True,
    order=7,
    secret="team-a/hub",
    ignored_policy="accept",
)
KEPT = {"is_wanted", "order", "secret", "ignored_policy"}


def test_what_a_worker_keeps_of_an_adapter_for_itself_is_in_no_message():
    listed = LoraInfo(available_loras=(ADAPTER,), loaded_loras=(ADAPTER,)).model_dump()
    loaded = TypeAdapter(LoadAnswer).dump_python(LoadAnswer.of(ADAPTER))
    for message in (*listed["available_loras"], *listed["loaded_loras"], loaded):
        assert message["lora_id"] == "sql/v1"
        assert not message.keys() & KEPT
    assert asdict(ADAPTER).keys() >= KEPT  # its record in the state folder has them


def test_an_adapter_on_disk_is_listed_without_its_empty_fields_and_read_back_whole():
    known = replace(ADAPTER, is_wanted=False, order=0, secret="", ignored_policy="")
    text = LoraInfo(available_loras=(known,)).model_dump_json()
    assert "last_used" not in text
    assert LoraInfo.model_validate_json(text).available_loras == (known,)
