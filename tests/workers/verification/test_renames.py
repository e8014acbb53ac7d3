"""Renames of an adapter's modules: which are safe, what they keep, and what is refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.cli.local.folders import rename
from lorafleet.service.failure import CommandFailed
from tests.adapters.recorded import FOLDER, CorpusFamily, read_all, read_family
from tests.adapters.test_corpus import rules_of, write_header
from workers.core.errors import SourceError
from workers.verification.manifest import AdapterRules, check_adapter
from workers.verification.renames import LANGUAGE_PREFIXES, plan_renames
from workers.verification.tensors import TensorHeader
from workers.verification.verify import read_tensors

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def text_names_are_lost(family: CorpusFamily) -> bool:
    """Whether vLLM was seen to serve the language model under its own names, and not under the text model's."""
    verdicts = {row.shape: row.verdict for row in family.rows}
    text, own = verdicts.get("text model's names"), verdicts.get("language part alone")
    return text is not None and own is not None and text.effect == "none" and own.serves


LOST = [family.name for family in read_all() if text_names_are_lost(family)]
SIZES = {"q_proj": 64, "v_proj": 32}
NO_BASE = AdapterRules(max_rank=None, base_names=frozenset(), base_check="off")
Rules = Callable[[str], AdapterRules]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    """The rules of a worker that serves a family's model, by its name."""
    root = tmp_path_factory.mktemp("bases")
    made: dict[str, AdapterRules] = {}

    def of(name: str) -> AdapterRules:
        if name not in made:
            made[name] = rules_of(read_family(FOLDER / f"{name}.json"), root / name)
        return made[name]

    return of


def pairs(*modules: str, prefix: str = "base_model.model.", end: str = ".weight") -> dict[str, TensorHeader]:
    """lora_A and lora_B of q_proj and v_proj in toy models: 64 inputs, 64 and 32 outputs."""
    return {
        f"{prefix}{module}.lora_{half}{end}": TensorHeader("F32", shape)
        for module in modules
        for half, shape in (("A", (8, 64)), ("B", (SIZES[module.rpartition(".")[2]], 8)))
    }


def layers(place: str, *, count: int = 2) -> tuple[str, ...]:
    return tuple(f"{place}layers.{layer}.self_attn.{name}" for layer in range(count) for name in ("q_proj", "v_proj"))


def raw(**changes: Any) -> bytes:
    return json.dumps(CONFIG | changes).encode()


@pytest.mark.parametrize(
    ("family", "trained", "renamed"),
    [
        ("gemma3", "model.", "model.language_model."),
        ("llava", "model.", "model.language_model."),
        ("paligemma", "model.", "model.language_model."),
        ("qwen3_vl", "model.", "model.language_model."),
        ("idefics3", "model.language_model.", "model.text_model."),
        ("llama", "model.language_model.", "model."),
        ("llama", "", "model."),
    ],
)
def test_language_model_gets_the_names_that_the_engine_finds(
    rules: Rules, family: str, trained: str, renamed: str
) -> None:
    tensors = pairs(*layers(trained))
    if family != "llama" or trained:
        with pytest.raises(SourceError, match="none of its"):
            check_adapter(raw(), tensors, rules(family))
    plan = plan_renames(raw(), tensors, rules(family))
    assert {name.removeprefix("base_model.model.") for name in plan.names.values()} == {
        name.removeprefix("base_model.model.") for name in pairs(*layers(renamed))
    }
    assert not plan.described.verdict.ignored
    assert len(plan.steps) == 1


@pytest.mark.parametrize("name", LOST)
def test_text_models_names_become_those_with_which_vllm_was_seen_to_serve_the_family(rules: Rules, name: str) -> None:
    rows = {row.shape: row for row in read_family(FOLDER / f"{name}.json").rows}
    text, wrapped = rows["text model's names"], rows["language part alone"]
    with pytest.raises(SourceError, match="lorafleet adapters rename-modules"):
        check_adapter(text.config, text.tensors, rules(name))
    plan = plan_renames(text.config, text.tensors, rules(name))
    assert {new: text.tensors[old] for old, new in plan.names.items()} == dict(wrapped.tensors)


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen2_vl"])
def test_right_names_are_kept(rules: Rules, family: str) -> None:
    place = "model." if family == "llama" else "model.language_model."
    tensors = pairs(*layers(place))
    plan = plan_renames(raw(), tensors, rules(family))
    assert dict(plan.names) == {name: name for name in tensors}
    assert plan.steps == ()


@pytest.mark.parametrize(
    "tensors",
    [
        pairs(*layers("model."), prefix="base_model.model." * 2),
        pairs(*layers("model."), prefix="base_model.model._orig_mod."),
        pairs(*layers("model."), end=".default.weight"),
        pairs(*layers("model."), prefix=""),
        pairs(*layers("model."), prefix="base_model.model." * 3 + "_orig_mod.", end=".sql.weight"),
        pairs(*layers("model."), prefix="module."),
        pairs(*layers("model."), prefix="base_model.model.module."),
        pairs(*layers("model."), prefix="module.module.base_model.model."),
        pairs(*layers("model."), prefix="pretrained_model.base_model.model."),
        pairs(*layers("model."), prefix="base_model.model.pretrained_model."),
        pairs(*layers("model."), prefix="_orig_mod.base_model.model."),
        pairs(*layers("model."), prefix="policy.module.base_model.model._orig_mod."),
    ],
)
def test_prefixes_and_wrappers_are_removed_without_a_base_model(tensors: dict[str, TensorHeader]) -> None:
    plan = plan_renames(raw(), tensors, NO_BASE)
    assert set(plan.names.values()) == set(pairs(*layers("model.")))
    assert plan.steps


@pytest.mark.parametrize("root", ["decoder.", "model.decoder.", "language_model.encoder.", "transformer."])
def test_single_modules_of_megatron_get_the_names_that_the_engine_finds(rules: Rules, root: str) -> None:
    names = {"q_proj": "linear_q", "v_proj": "linear_v"}
    tensors = {
        f"base_model.model.{root}layers.{layer}.self_attention.{names[own]}.lora_{half}.weight": header
        for layer in range(2)
        for own in names
        for half, header in (("A", TensorHeader("F32", (8, 64))), ("B", TensorHeader("F32", (SIZES[own], 8))))
    }
    config = raw(target_modules=["linear_q", "linear_v"], alpha_pattern={"linear_q": 4})
    plan = plan_renames(config, tensors, rules("llama"))
    assert set(plan.names.values()) == set(pairs(*layers("model.")))
    new = json.loads(plan.config)
    assert (new["alpha_pattern"], set(new["target_modules"])) == ({"q_proj": 4}, set(layers("model.")))


def test_packed_modules_of_megatron_are_refused_with_what_to_do() -> None:
    tensors = {
        f"decoder.layers.0.self_attention.linear_qkv.lora_{half}.weight": TensorHeader("F32", (8, 64)) for half in "AB"
    }
    with pytest.raises(SourceError, match=r"linear_qkv holds several modules.*Megatron-Bridge"):
        plan_renames(raw(), tensors, NO_BASE)


def test_two_adapters_in_one_file_are_refused() -> None:
    tensors = pairs(*layers("model."), end=".one.weight") | pairs(*layers("model."), end=".two.weight")
    with pytest.raises(SourceError, match=r"one, two.*accepted is one"):
        plan_renames(raw(), tensors, NO_BASE)


def test_adapter_of_another_model_is_refused_with_the_fault_that_no_rename_mends(rules: Rules) -> None:
    with pytest.raises(SourceError) as refused:
        plan_renames(raw(), pairs(*layers("transformer.h.")), rules("gemma3"))
    assert refused.value.code == "modules_unmatched"
    with pytest.raises(SourceError) as refused:  # more layers than the base model
        plan_renames(raw(), pairs(*layers("model.", count=5)), rules("gemma3"))
    assert refused.value.code == "module_unknown"
    assert "layers.2." in str(refused.value)
    wide = {name: TensorHeader("F32", (each.shape[0], 96)) for name, each in pairs(*layers("model.")).items()}
    with pytest.raises(SourceError) as refused:
        plan_renames(
            raw(), {**pairs(*layers("model.")), **{n: t for n, t in wide.items() if "lora_A" in n}}, rules("gemma3")
        )
    assert refused.value.code == "shape_mismatch"


def test_ranks_and_targets_follow_the_new_names(rules: Rules) -> None:
    config = raw(
        target_modules=r"^model\.layers\.\d+\.self_attn\.(?:q|v)_proj$",
        rank_pattern={"model.layers.0.self_attn.q_proj": 8, "v_proj": 8},
        alpha_pattern={"model.layers.1.self_attn.v_proj": 32},
    )
    plan = plan_renames(config, pairs(*layers("model.")), rules("gemma3"))
    content = json.loads(plan.config)
    assert content["target_modules"] == sorted(layers("model.language_model."))
    assert list(content["rank_pattern"]) == ["model.language_model.layers.0.self_attn.q_proj", "v_proj"]
    assert content["alpha_pattern"] == {"model.language_model.layers.1.self_attn.v_proj": 32}
    kept = {key: value for key, value in content.items() if not key.endswith(("_pattern", "target_modules"))}
    assert kept == {key: value for key, value in CONFIG.items() if key != "target_modules"}


def test_expression_that_matches_old_names_alone_is_refused(rules: Rules) -> None:
    config = raw(alpha_pattern={r"^model\.layers\.0\..*": 32})
    with pytest.raises(SourceError, match="match only one of"):
        plan_renames(config, pairs(*layers("model.")), rules("gemma3"), language="wrapped")


@given(st.sampled_from(sorted(LANGUAGE_PREFIXES)), st.lists(st.sampled_from(layers("model.", count=4)), min_size=1))
def test_rename_is_a_bijection_and_keeps_layer_and_projection(language: str, modules: list[str]) -> None:
    tensors = pairs(*modules)
    plan = plan_renames(raw(), tensors, NO_BASE, language=language)
    assert len(set(plan.names.values())) == len(tensors)
    assert [new[new.index("layers.") :] for new in plan.names.values()] == [
        old[old.index("layers.") :] for old in tensors
    ]


def data_of(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()


def test_written_adapter_has_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    folder, out = tmp_path / "sql", tmp_path / "renamed"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(raw())
    weights = folder / "adapter_model.safetensors"
    write_header(weights, pairs(*layers("model."), prefix="base_model.model." * 2))
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(size - 4096)
        file.write(bytes(range(256)) * 16)
    lines = rename(folder, out, None, None)
    assert any("base_model.model.model.layers.0" in line for line in lines)
    assert "new lora_id" in lines[-1]
    renamed = read_tensors(out / "adapter_model.safetensors")
    assert set(renamed) == set(pairs(*layers("model.")))
    assert data_of(out / "adapter_model.safetensors") == data_of(weights)
    assert list(renamed.values()) == list(read_tensors(weights).values())
    with pytest.raises(CommandFailed, match="not empty"):
        rename(folder, out, None, None)
    assert "names already" in rename(out, tmp_path / "again", None, None)[0]


def test_refused_adapter_writes_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "renamed"
    (folder / "checkpoint-10").mkdir(parents=True)
    with pytest.raises(CommandFailed, match="checkpoint-10"):
        rename(folder, out, None, None)
    with pytest.raises(CommandFailed, match="no such folder"):
        rename(tmp_path / "nowhere", out, None, None)
    with pytest.raises(CommandFailed, match="--to needs --base"):
        rename(folder, out, None, "wrapped")
    assert not out.exists()
