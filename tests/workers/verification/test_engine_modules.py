"""What an engine's model class does with the names in an adapter: served, ignored, refused, by version."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.tiny_model import make_adapter
from workers.core.errors import SourceError
from workers.engines.vllm_tables import vllm_facts, vllm_table, with_version
from workers.storage.local_adapters import LocalAdapters
from workers.verification.base_model import BaseModel, EngineFacts, base_model
from workers.verification.manifest import AdapterDescription, AdapterRules, check_adapter
from workers.verification.model_classes import NameRules
from workers.verification.tensors import Shape, TensorHeader
from workers.verification.verify import read_base_model

HIDDEN, MIDDLE, EXPERTS, RANK = 64, 96, 4, 8
LAYER = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.down_proj": (64, 96)}
NEOX_LAYER = {"attention.query_key_value": (192, 64), "mlp.dense_4h_to_h": (64, 256)}
TEXT = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "moe_intermediate_size": MIDDLE}
EXPERT_PAIRS = {".experts.base_layer": (2 * MIDDLE, HIDDEN), ".experts": (HIDDEN, MIDDLE)}


def layers(prefix, modules=LAYER):
    return {f"{prefix}.{number}.{name}": shape for number in range(2) for name, shape in modules.items()}


def base(architecture, weights, version="0.32", *, facts=None, **config) -> BaseModel:
    facts = facts or EngineFacts(table=vllm_table(version))
    found = base_model({"architectures": [architecture], **config}, weights, facts=facts)
    assert found is not None
    return found


def tensors(modules: dict[str, Shape], experts=0) -> dict[str, TensorHeader]:
    """An adapter's tensors for modules of these [out, in]; `experts`: stacked experts have so many times the rank."""
    found = {}
    for module, (out, into) in modules.items():
        rank = RANK * (experts if experts and module.endswith((".experts", ".base_layer")) else 1)
        found[f"base_model.model.{module}.lora_A.weight"] = TensorHeader("BF16", (rank, into))
        found[f"base_model.model.{module}.lora_B.weight"] = TensorHeader("BF16", (out, rank))
    return found


def verdict(modules, base, experts=0, **config) -> AdapterDescription:
    raw = {"r": RANK, "lora_alpha": 16, "target_modules": "all-linear", **config}
    rules = AdapterRules(64, frozenset(), "off", base)
    return check_adapter(json.dumps(raw).encode(), tensors(modules, experts), rules)


def refusal(modules, base, experts=0, **config) -> tuple[str, str]:
    with pytest.raises(SourceError) as refused:
        verdict(modules, base, experts, **config)
    return refused.value.code, str(refused.value)


# --- multimodal models --------------------------------------------------------------------------------------------

WRAPPED = layers("model.language_model.layers")
TEXT_ONLY = layers("model.layers")
TOWER = {f"model.vision_tower.vision_model.encoder.layers.{n}.self_attn.q_proj": (64, 64) for n in range(2)}
GEMMA3 = ("Gemma3ForConditionalGeneration", {**WRAPPED, **TOWER})
TAKES_WRAPPED_ALONE = [
    "Gemma3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
]
TAKES_TEXT_NAMES = [
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
]


@pytest.mark.parametrize("architecture", TAKES_WRAPPED_ALONE)
def test_adapter_of_the_text_model_alone_is_refused_where_the_engine_would_answer_by_the_base(architecture):
    model = base(architecture, WRAPPED, text_config=TEXT)
    code, message = refusal(TEXT_ONLY, model)
    assert code == "modules_unmatched"
    assert "AutoModelForImageTextToText" in message
    assert "accepted are modules such as model.language_model.layers.0.self_attn.q_proj" in message
    assert verdict(WRAPPED, model).modules == len(WRAPPED)


@pytest.mark.parametrize("architecture", TAKES_WRAPPED_ALONE)
def test_newer_engine_finds_the_text_model_by_its_own_names(architecture):
    model = base(architecture, WRAPPED, "0.33", text_config=TEXT)
    assert verdict(TEXT_ONLY, model).verdict.ignored == ()


@pytest.mark.parametrize("architecture", TAKES_TEXT_NAMES)
def test_adapter_of_the_text_model_alone_is_accepted_where_the_class_knows_its_names(architecture):
    model = base(architecture, WRAPPED, text_config=TEXT)
    assert verdict(TEXT_ONLY, model).verdict.ignored == ()
    assert verdict(WRAPPED, model).verdict.ignored == ()


@pytest.mark.parametrize("architecture", ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"])
def test_class_that_renames_nothing_takes_the_names_of_its_checkpoint(architecture):
    model = base(architecture, layers("model.text_model.layers"), text_config=TEXT)
    assert verdict(layers("model.text_model.layers"), model).verdict.ignored == ()
    assert refusal(TEXT_ONLY, model)[0] == "modules_unmatched"


def test_modules_of_a_tower_are_ignored_and_named():
    model = base(*GEMMA3, text_config=TEXT)
    found = verdict({**WRAPPED, **TOWER}, model)
    assert found.verdict.ignored == tuple(sorted(TOWER))
    assert "2 of its 8 modules are ignored" in found.verdict.why[0]
    assert refusal(TOWER, model)[0] == "modules_unmatched", "nothing of it would be served"


def test_modules_of_a_tower_are_served_by_an_engine_that_is_told_to():
    facts = EngineFacts(table=vllm_table("0.32"), with_towers=True)
    assert verdict({**WRAPPED, **TOWER}, base(*GEMMA3, facts=facts, text_config=TEXT)).verdict.ignored == ()


@pytest.mark.parametrize(
    "flags",
    [("--language-model-only",), ("--limit-mm-per-prompt", '{"image": 0}'), ('--limit-mm-per-prompt={"image":0}',)],
)
def test_modules_of_a_tower_are_refused_by_an_engine_that_takes_text_alone(flags):
    alone = base(*GEMMA3, facts=vllm_facts(["vllm", "serve", "m", *flags]), text_config=TEXT)
    names = {f"model.vision_tower.vision_model.encoder.layers.0.mlp.{name}": (64, 64) for name in ("fc1", "fc2")}
    code, message = refusal({**WRAPPED, **names}, alone)
    assert (code, "it takes text alone" in message) == ("module_unknown", True)
    assert verdict(WRAPPED, alone).verdict.ignored == ()
    assert verdict({**WRAPPED, **TOWER}, alone).verdict.ignored == tuple(sorted(TOWER)), (
        "vLLM passes over names it has elsewhere"
    )
    with_pictures = base(*GEMMA3, facts=vllm_facts(["vllm", "serve", "m", "--limit-mm-per-prompt", '{"image": 1}']))
    assert len(verdict({**WRAPPED, **names}, with_pictures).verdict.ignored) == 2


def test_layer_that_the_base_model_lacks_is_refused_among_others():
    more = {**WRAPPED, "model.language_model.layers.7.self_attn.q_proj": (64, 64)}
    code, message = refusal(more, base(*GEMMA3, text_config=TEXT))
    assert (code, "layers.7" in message) == ("module_unknown", True)


def test_shapes_are_compared_under_each_name():
    model = base("Qwen2VLForConditionalGeneration", WRAPPED, text_config=TEXT)
    wrong = {**TEXT_ONLY, "model.layers.1.mlp.down_proj": (64, 128)}
    assert refusal(wrong, model)[0] == "shape_mismatch"


# --- experts ------------------------------------------------------------------------------------------------------

THREE_D = {
    "GptOssForCausalLM": "model.layers.{}.mlp",
    "Qwen3_5MoeForConditionalGeneration": "model.language_model.layers.{}.mlp",
    "Qwen3VLMoeForConditionalGeneration": "model.language_model.layers.{}.mlp",
}


def stacked(pattern, pairs=EXPERT_PAIRS):
    return {f"{pattern.format(n)}{end}": shape for n in range(2) for end, shape in pairs.items()}


def experts_base(architecture, pattern, **more):
    weights = {f"{pattern.format(n)}.gate": (EXPERTS, HIDDEN) for n in range(2)}
    return base(architecture, weights, text_config={**TEXT, "num_experts": EXPERTS, **more})


@pytest.mark.parametrize(("architecture", "pattern"), THREE_D.items())
def test_stacked_experts_are_served_by_their_classes_with_the_rank_of_one(architecture, pattern):
    model = experts_base(architecture, pattern)
    found = verdict(stacked(pattern), model, EXPERTS, target_modules=None, target_parameters=["experts.gate_up_proj"])
    assert (found.rank, found.modules, found.verdict.ignored) == (RANK, 4, ())


def test_rank_of_stacked_experts_is_compared_with_the_config_and_the_engine():
    pattern = THREE_D["GptOssForCausalLM"]
    model = experts_base("GptOssForCausalLM", pattern)
    assert refusal(stacked(pattern), model, EXPERTS, r=4)[0] == "rank_mismatch"
    assert refusal(stacked(pattern), model, 3)[0] == "rank_mismatch"
    ranks = {"experts.gate_up_proj": RANK, "experts.down_proj": RANK}
    assert verdict(stacked(pattern), model, EXPERTS, r=4, rank_pattern=ranks).rank == RANK


def test_stacked_rank_that_is_no_multiple_of_the_experts_is_refused():
    pattern = THREE_D["GptOssForCausalLM"]
    code, message = refusal(stacked(pattern), experts_base("GptOssForCausalLM", pattern, num_experts=5), EXPERTS, r=6)
    assert (code, "no multiple of the base model's 5 experts" in message) == ("rank_mismatch", True)


def test_experts_stacked_the_other_way_round_are_refused_as_the_engine_would_misread_them():
    pattern = THREE_D["GptOssForCausalLM"]
    turned = stacked(pattern, {end: shape[::-1] for end, shape in EXPERT_PAIRS.items()})
    code, message = refusal(turned, experts_base("GptOssForCausalLM", pattern), EXPERTS)
    assert (code, "PEFT before" in message) == ("shape_mismatch", True)


def test_half_of_the_stacked_experts_is_refused_as_the_engine_fails_on_it():
    pattern = THREE_D["GptOssForCausalLM"]
    half = {name: shape for name, shape in stacked(pattern).items() if not name.endswith("base_layer")}
    assert refusal(half, experts_base("GptOssForCausalLM", pattern), EXPERTS)[0] == "module_unsupported"


def test_stacked_experts_are_refused_where_the_engine_wants_them_one_by_one():
    pattern = "model.layers.{}.mlp"
    model = experts_base("Qwen3MoeForCausalLM", pattern)
    code, message = refusal(stacked(pattern), model, EXPERTS)
    assert (code, "target_parameters" in message) == ("module_unsupported", True)
    one_by_one = {f"model.layers.0.mlp.experts.{n}.gate_proj": (MIDDLE, HIDDEN) for n in range(EXPERTS)}
    assert verdict(one_by_one, model).modules == EXPERTS
    beyond = {f"model.layers.0.mlp.experts.{EXPERTS}.gate_proj": (MIDDLE, HIDDEN)}
    assert refusal({**one_by_one, **beyond}, model)[0] == "module_unsupported"


def test_experts_that_the_engine_drops_are_ignored_and_named():
    attention = layers("model.layers", {"self_attn.q_proj": (64, 64)})
    weights = {**attention, "model.layers.0.block_sparse_moe.experts.0.w1": (MIDDLE, HIDDEN)}
    model = base("MixtralForCausalLM", weights, num_local_experts=EXPERTS, **TEXT)
    experts = stacked("model.layers.{}.mlp")
    found = verdict({**attention, **experts}, model, EXPERTS)
    assert found.verdict.ignored == tuple(sorted(experts))
    assert refusal(experts, model, EXPERTS)[0] == "modules_unmatched"
    own = {f"model.layers.0.block_sparse_moe.experts.{n}.w1": (MIDDLE, HIDDEN) for n in range(EXPERTS)}
    assert verdict({**attention, **own}, model).verdict.ignored == ()


# --- heads, embeddings, names of trainers -------------------------------------------------------------------------

HEAD = {
    "base_model.model.score.weight": TensorHeader("F32", (3, HIDDEN)),
}


def with_head(base, **config):
    raw = {"r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **config}
    rules = AdapterRules(64, frozenset(), "off", base)
    return check_adapter(json.dumps(raw).encode(), {**tensors(TEXT_ONLY), **HEAD}, rules)


def test_classification_head_is_accepted_where_the_engine_classifies():
    saved = {"modules_to_save": ["classifier", "score"]}
    assert with_head(base("Qwen3ForSequenceClassification", TEXT_ONLY, **TEXT), **saved).modules == len(TEXT_ONLY)
    with pytest.raises(SourceError) as refused:
        with_head(base("Qwen3ForCausalLM", TEXT_ONLY, **TEXT), **saved)
    assert refused.value.code == "modules_to_save_unsupported"
    token = ("Qwen3ForTokenClassification", TEXT_ONLY)
    with pytest.raises(SourceError):
        with_head(base(*token, **TEXT), **saved)
    assert with_head(base(*token, "0.33", **TEXT), **saved).modules == len(TEXT_ONLY)


def test_names_of_automodel_are_served_by_engines_for_embeddings_alone():
    names = layers("layers")
    pooling = EngineFacts(table=vllm_table("0.32"), is_pooling=True)
    assert verdict(names, base("Qwen3ForCausalLM", TEXT_ONLY, facts=pooling, **TEXT)).verdict.ignored == ()
    assert verdict(names, base("Qwen3Model", names, **TEXT)).verdict.ignored == ()
    code, message = refusal(names, base("Qwen3ForCausalLM", TEXT_ONLY, **TEXT))
    assert (code, "AutoModel" in message) == ("modules_unmatched", True)


def test_doubled_prefix_is_read_as_the_engine_reads_it():
    names = {f"base_model.model.{name}": shape for name, shape in TEXT_ONLY.items()}
    assert verdict(names, base("Qwen3ForCausalLM", TEXT_ONLY, **TEXT)).verdict.ignored == ()


def test_module_that_the_engine_refuses_is_refused_with_the_option_that_takes_it():
    model = base("Qwen3ForCausalLM", {**TEXT_ONLY, "model.layers.0.extra": (64, 64)}, **TEXT)
    code, message = refusal({**TEXT_ONLY, "model.layers.0.extra": (64, 64)}, model)
    assert (code, "all-linear" in message) == ("module_unknown", True)


# --- quantized models, unknown classes ----------------------------------------------------------------------------


def test_packed_weights_are_found_by_name_and_what_was_not_compared_is_said():
    config = {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": {"quant_method": "awq"}, **TEXT}
    facts = EngineFacts(table=vllm_table("0.32"))
    model = base_model(config, {"model.embed_tokens": (100, 64)}, packed=TEXT_ONLY, facts=facts)
    attention = layers("model.layers", {"self_attn.q_proj": (64, 64)})
    assert verdict(attention, model).verdict.notes == (
        "2 of 2 modules were not compared with the base model's shapes: its weights are packed (awq)",
    )
    assert refusal({**attention, "model.layers.9.self_attn.q_proj": (64, 64)}, model)[0] == "module_unknown"


def test_sizes_of_the_config_are_compared_where_weights_are_packed():
    sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **TEXT, **sizes}
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    model = base_model(config, {}, packed=TEXT_ONLY, facts=EngineFacts(table=vllm_table("0.32")))
    assert verdict(TEXT_ONLY, model).verdict.notes == ()
    assert refusal({"model.layers.0.self_attn.q_proj": (64, 32)}, model)[0] == "shape_mismatch"


def test_packed_language_model_of_a_multimodal_model_has_the_sizes_of_its_text_config(tmp_path):
    text = {"model_type": "qwen2_5_vl_text", "num_attention_heads": 4, "num_key_value_heads": 2, **TEXT}
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text}
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = layers("model.language_model.layers", {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64)})
    packed = {f"{name}.qweight": ("I32", [into, out // 8]) for name, (out, into) in attention.items()}
    tower = {"model.visual.blocks.0.attn.proj.weight": ("U8", [2048, 1]), "model.norm.weight": ("BF16", [64])}
    write_header(tmp_path / "model.safetensors", {**packed, **tower})
    model = read_base_model(tmp_path, EngineFacts(table=vllm_table("0.32")))
    assert verdict(attention, model).verdict.notes == ()
    assert refusal({"model.layers.0.self_attn.v_proj": (64, 64)}, model)[0] == "shape_mismatch"


def write_header(path, tensors):
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * {"I32": 4, "U8": 1, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_head_of_a_multimodal_model_is_served_where_its_class_has_one(architecture):
    weights = {**WRAPPED, "model.language_model.embed_tokens": (100, 64)}
    head = {**WRAPPED, "lm_head": (100, 64)}
    assert verdict(head, base(architecture, weights, text_config=TEXT)).verdict.ignored == ()
    gemma = base("Gemma3ForConditionalGeneration", weights, text_config=TEXT)
    assert refusal(head, gemma)[0] == "module_unsupported"


def test_kind_of_layer_that_the_class_was_not_seen_to_have_is_left_to_the_engine():
    mixer = layers("model.layers", {"mixer.x_proj": (64, 64)})
    model = base("Qwen3ForCausalLM", {**TEXT_ONLY, **mixer}, **TEXT)
    found = verdict({**TEXT_ONLY, **mixer}, model)
    assert found.verdict.ignored == ()
    assert "model.layers.0.mixer.x_proj, model.layers.1.mixer.x_proj is not in its table" in found.verdict.why[0]
    assert refusal({**TEXT_ONLY, "model.layers.0.mixer.x_proj": (64, 32)}, model)[0] == "shape_mismatch"


def test_class_that_is_not_in_the_table_leaves_the_question_to_the_engine():
    found = verdict(TEXT_ONLY, base("SomethingNewForCausalLM", TEXT_ONLY, **TEXT))
    assert found.verdict.ignored == ()
    assert found.verdict.why == ("which modules of SomethingNewForCausalLM the engine uses is not in its table",)


def test_class_that_is_not_in_the_table_is_asked_about_embeddings_and_names_of_automodel():
    unknown = base("SomethingNewForCausalLM", {**TEXT_ONLY, "model.embed_tokens": (256, 64)}, **TEXT)
    embeddings = {
        "base_model.model.model.embed_tokens.lora_embedding_A": TensorHeader("BF16", (RANK, 256)),
        "base_model.model.model.embed_tokens.lora_embedding_B": TensorHeader("BF16", (64, RANK)),
    }
    raw = json.dumps({"r": RANK, "lora_alpha": 16, "target_modules": "all-linear"}).encode()
    rules = AdapterRules(64, frozenset(), "off", unknown)
    assert check_adapter(raw, {**tensors(TEXT_ONLY), **embeddings}, rules).modules == len(TEXT_ONLY) + 1
    assert verdict(layers("layers"), unknown).verdict.ignored == ()


def test_layer_that_the_base_model_lacks_is_refused_for_a_class_that_is_not_in_the_table():
    more = {**TEXT_ONLY, "model.layers.7.self_attn.q_proj": (64, 64)}
    code, message = refusal(more, base("SomethingNewForCausalLM", TEXT_ONLY, **TEXT))
    assert (code, "layers.7." in message) == ("module_unknown", True)


@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "GPTNeoXForCausalLM"])
def test_class_by_the_code_of_transformers_finds_names_of_automodel_and_no_head(architecture):
    root, modules = ("model", LAYER) if architecture == "Olmo2ForCausalLM" else ("gpt_neox", NEOX_LAYER)
    found = base(architecture, {**layers(f"{root}.layers", modules), "lm_head": (256, 64)}, **TEXT)
    for prefix in (f"{root}.layers", "layers"):
        assert verdict(layers(prefix, modules), found).verdict.ignored == ()
    assert refusal({**layers("layers", modules), "lm_head": (256, 64)}, found)[0] == "module_unsupported"
    assert refusal({**layers("layers", modules), "layers.7." + next(iter(modules)): (64, 64)}, found)[0] == (
        "module_unknown"
    )


def test_lora_on_the_head_of_a_classifier_is_served_by_classes_that_the_engine_derives():
    names = {**TEXT_ONLY, "score": (3, 64)}
    assert verdict(names, base("Qwen3ForSequenceClassification", names, **TEXT)).verdict.ignored == ()
    assert refusal(names, base("Qwen3ForCausalLM", TEXT_ONLY, **TEXT))[0] == "module_unknown"


def test_both_halves_of_tied_embeddings_are_targeted_by_either_name():
    found = base("LlamaForCausalLM", {**TEXT_ONLY, "model.embed_tokens": (256, 64)}, **TEXT)
    pair = {
        "base_model.model.model.embed_tokens.lora_embedding_A": TensorHeader("BF16", (RANK, 256)),
        "base_model.model.model.embed_tokens.lora_embedding_B": TensorHeader("BF16", (64, RANK)),
        **tensors({"lm_head": (256, 64)}),
    }
    rules = AdapterRules(64, frozenset(), "off", found)
    raw = {"r": RANK, "lora_alpha": 16, "target_modules": ["embed_tokens", "model.embed_tokens"]}
    assert check_adapter(json.dumps({**raw, "ensure_weight_tying": True}).encode(), pair, rules).modules == 2
    with pytest.raises(SourceError) as refused:
        check_adapter(json.dumps(raw).encode(), pair, rules)
    assert refused.value.code == "module_untargeted"


def test_version_without_a_table_has_none():
    assert vllm_table("0.31.2") is None
    assert vllm_table("nightly") is None
    assert vllm_table("0.32.1") is vllm_table("0.32.0")


def test_engine_that_says_its_version_gets_that_versions_table():
    facts = vllm_facts(["vllm", "serve", "m", "--enable-tower-connector-lora", "--runner", "pooling"])
    assert (facts.with_towers, facts.is_pooling, facts.table) == (True, True, vllm_table("0.32"))
    assert with_version(facts, "0.33.0").table is vllm_table("0.33")
    assert with_version(facts, "").table is facts.table, "it does not say"
    assert with_version(facts, "0.40.0").table is None


async def test_adapters_of_a_folder_are_checked_again_by_other_rules_without_reading_their_weights(tmp_path):
    folder = make_adapter(tmp_path / "adapters", "mine")
    local = LocalAdapters(tmp_path / "adapters", AdapterRules(64, frozenset(), "off"))
    assert await local.scan()
    before = local.find("mine")
    assert before.manifest is not None
    local.use_rules(AdapterRules(4, frozenset(), "off"))
    assert await local.scan()
    assert "max_lora_rank 4" in local.find("mine").error
    local.use_rules(AdapterRules(64, frozenset(), "off"))
    assert await local.scan()
    assert local.find("mine") == before
    assert not await local.scan(), f"{folder} has not changed"


# --- names --------------------------------------------------------------------------------------------------------

PARTS = st.sampled_from(["model.", "language_model.", "visual.", "layers.0.", "x."])
NAMES = st.lists(PARTS, max_size=4).map(lambda parts: "".join(parts) + "q_proj.lora_A.weight")
BEGINNINGS = st.lists(st.tuples(st.sampled_from(["model.", "lm_head.", "model.visual."]), PARTS), max_size=3)


@given(NAMES, BEGINNINGS)
def test_beginnings_are_renamed_in_their_order_and_once(name, rows):
    expected = name
    for old, new in rows:
        expected = new + expected.removeprefix(old) if expected.startswith(old) else expected
    assert NameRules(beginnings=tuple(rows)).renamed(name) == expected


# --- layers that run past an adapter -------------------------------------------------------------------------------

LATENT = {"self_attn.q_proj": (64, 64), "self_attn.kv_b_proj": (128, 512)}


@pytest.mark.parametrize(
    "architecture",
    ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM"],
)
@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_projection_that_latent_attention_holds_itself_is_ignored_and_alone_refused(architecture, version):
    weights = layers("model.layers", LATENT)
    found = verdict(weights, base(architecture, weights, version))
    projections = tuple(f"model.layers.{number}.self_attn.kv_b_proj" for number in range(2))
    assert (found.verdict.ignored, found.verdict.uncalled) == (projections, projections)
    assert "past what adapters change" in found.verdict.why[0]
    alone = {name: shape for name, shape in weights.items() if name in projections}
    code, message = refusal(alone, base(architecture, weights, version))
    assert (code, "accepted are adapters on other layers, too" in message) == ("modules_unmatched", True)


def test_projection_of_the_same_name_that_a_class_calls_is_served():
    weights = layers("model.layers", {"self_attn.kv_b_proj": (128, 512)})
    assert verdict(weights, base("MiniCPM3ForCausalLM", weights)).verdict.ignored == ()


def test_projection_of_a_class_that_was_not_built_is_ignored_too():
    weights = layers("model.layers", LATENT)
    assert len(verdict(weights, base("PanguUltraMoEForCausalLM", weights)).verdict.uncalled) == 2
