"""Which files of a folder are an adapter's, and what other folders are."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.tiny_model import make_adapter
from tests.workers.contexts import agent_context, installer_of, inventory_of
from workers.core.errors import SourceError
from workers.sources.local import LocalSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.verification.adapter_files import adapter_file_names, folder_description
from workers.verification.manifest import AdapterRules, digest
from workers.verification.verify import read_file_entry
from workers.wire import InspectRequest, LoadRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RULES = AdapterRules(64, frozenset(), "off")
PARTS = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"]
CHECKPOINTS = ["checkpoint-100", "checkpoint-900", "checkpoint-1000", "runs"]


@given(
    st.frozensets(
        st.sampled_from(
            ["model.safetensors", "new_embeddings.safetensors", "README.md", "adapter_model.bin", "optimizer.pt"]
        )
    )
)
def test_files_beside_an_adapter_never_count(beside):
    assert adapter_file_names({CONFIG, WEIGHTS, *beside}, allow_pickle=True) == {CONFIG, WEIGHTS}


@pytest.mark.parametrize(
    ("names", "folders", "words"),
    [
        ([CONFIG, "adapters.safetensors"], [], ["MLX", "lora_A.weight"]),
        ([CONFIG, "adapters.npz"], [], ["MLX"]),
        ([CONFIG, *PARTS], [], ["2 parts", "join"]),
        (["trainer_state.json"], CHECKPOINTS, ["3 checkpoints", "checkpoint-1000"]),
        (["config.json", "model-00001-of-00004.safetensors"], [], ["whole model", "full fine-tune"]),
        (["config.json", "pytorch_model.bin"], [], ["whole model"]),
        (["pytorch_lora_weights.safetensors"], [], ["diffusers"]),
        (["model_index.json"], ["unet", "vae"], ["diffusers"]),
        (["lora.safetensors", "params.json"], [], ["Mistral"]),
        (["consolidated.00.pth", "params.json"], [], ["Mistral"]),
        (["sql.nemo"], [], ["NeMo", "export_lora"]),
        ([], ["context", "weights"], ["NeMo", "export_lora"]),
        ([".metadata", "__0_0.distcp"], [], ["Megatron", "export_adapter_ckpt"]),
        ([CONFIG, "lora-f16.gguf"], [], ["llama.cpp"]),
        ([CONFIG, "README.md"], [], ["found adapter_config.json, 1 other file;", WEIGHTS]),
        (["a.txt", "b.txt"], ["secret"], ["found 2 other files, 1 folder;"]),
        ([], [], ["nothing"]),
    ],
)  # fmt: skip
def test_message_says_what_the_folder_is_and_what_to_do(names, folders, words):
    assert all(word in folder_description(names, folders) for word in (*words, "accepted"))
    if CONFIG in names:
        with pytest.raises(SourceError, match=words[0]) as refused:
            adapter_file_names(names, allow_pickle=False, folders=folders)
        assert refused.value.code == "adapter_incomplete"


class InstallerOnDisk:
    """An installer of adapters in one folder, with its cache and its log of installed adapters."""

    def __init__(self, root: Path) -> None:
        self.disk = CacheFolder(root / "cache", agent_id="a", grace_s=10.0, lease_s=100.0)
        self.cache = AdapterCache(
            self.disk, sources={"file": LocalSource([root], max_bytes=1 << 30)}, rules=RULES, fetch_deadline_s=10
        )
        context = agent_context(self.cache, root / "state", secrets=root / "secrets")
        self.inventory = inventory_of(context)
        self.installer = installer_of(context, self.inventory)


def adapter_beside_its_merged_model(root: Path) -> Path:
    folder = make_adapter(root / "from", "a/v1")
    (folder / "model.safetensors").write_bytes(b"sixteen gigabytes")
    return folder


async def test_merged_model_beside_an_adapter_is_neither_stored_nor_counted(tmp_path):
    folder = adapter_beside_its_merged_model(tmp_path)
    disk = InstallerOnDisk(tmp_path)
    found = await disk.installer.inspect(InspectRequest(lora_id="a/v1", source=str(folder)))
    entries = [read_file_entry(folder / name) for name in (CONFIG, WEIGHTS)]
    assert (found.digest, found.size_bytes) == (digest(entries), sum(entry.size_bytes for entry in entries))
    assert set(await disk.cache.files(found.digest)) == {CONFIG, WEIGHTS}
    assert "model.safetensors (a whole model" in found.files_note


async def test_other_bytes_are_a_mismatch_and_a_merged_model_beside_counts_for_neither(tmp_path):
    folder = adapter_beside_its_merged_model(tmp_path)
    disk = InstallerOnDisk(tmp_path)
    with pytest.raises(SourceError) as refused:
        await disk.installer.install(LoadRequest(lora_id="a/v1", source=str(folder), digest="0" * 64))
    assert refused.value.code == "digest_mismatch"
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError) as refused:
        await disk.installer.install(LoadRequest(lora_id="a/v1", source=str(folder), digest="0" * 64))
    assert refused.value.code == "digest_mismatch"
