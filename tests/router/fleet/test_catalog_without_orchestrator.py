"""A router without an orchestrator knows what workers' settings name: never two kinds of bytes under one name."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.catalog import configured_adapters, discovered_adapters
from workers.wire import UNKNOWN_RUNTIME, LoraInfo, Metadata, ModelCard, Transport, WorkerAdapter

ONE, TWO = "1" * 64, "2" * 64
ITEMS = st.builds(
    lambda name, digest, is_own: WorkerAdapter(
        lora_id=name,
        digest="" if is_own else digest,
        engine_name=name if is_own else "",
        files_digest=digest if is_own else "",
        state="ready" if is_own else ("on_disk" if digest else "failed"),
        error=None if digest or is_own else "weights_corrupt: cut off",
        source=f"/adapters/{name}",
        is_configured=True,
    ),
    st.sampled_from(("a/v1", "b/v1", "no name")),
    st.sampled_from(("", ONE, TWO)),
    st.booleans(),
)


@given(st.lists(st.tuples(st.sampled_from(("base", "other")), st.lists(ITEMS, max_size=3)), max_size=3))
def test_each_name_has_one_kind_of_bytes_or_an_error(lists):
    found = configured_adapters(lists)
    named = [item for _, items in lists for item in items if item.lora_id != "no name"]
    assert found.keys() == {item.lora_id for item in named}
    for lora_id, adapter in found.items():
        usable = {
            item.digest or item.files_digest or item.path
            for item in named
            if item.lora_id == lora_id and (item.digest or item.engine_name == lora_id)
        }
        assert (adapter.error is None) is (len(usable) == 1)
        assert adapter.error is not None or adapter.engine_name


def test_a_version_that_an_agent_loaded_answers_for_its_lora_id_only_where_no_orchestrator_does():
    name, source = "sql/v1@111111111111", "file:///loras/sql"
    lora = WorkerAdapter(lora_id="sql/v1", digest="", engine_name=name, state="ready", source=source)
    report = Metadata(
        instance_id="w0",
        model=ModelCard(name="base", base_model="base", runtime_config=UNKNOWN_RUNTIME),
        transport=Transport(engine_url="http://e0"),
        lora=LoraInfo(loaded_loras=(lora,)),
        agent_boot_id="none",
    )
    assert discovered_adapters([report], ()) == {}
    (adapter,) = discovered_adapters([report], (), has_orchestrator=False).values()
    assert (adapter.lora_id, adapter.engine_name, adapter.is_listed, adapter.source) == ("sql/v1", name, True, source)
