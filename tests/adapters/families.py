"""The model families of the corpus: a toy configuration of each, as transformers takes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "experts", "multimodal", "pooling"]

VOCABULARY = 256
# CPU attention of vLLM takes heads of 32 and more.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "num_channels": 3,
}
_QWEN_VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_QWEN3_5_VISION = {**_QWEN_VISION, "deepstack_visual_indexes": [], "num_position_embeddings": 16}
_QWEN3_VISION = {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_LFM2: Mapping[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_dim": 64,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 8,
}
_LINEAR_ATTENTION: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family: its `model_type` in transformers, and what of its configuration is not the default.

    auto         the class of transformers that makes it
    text         keys of the configuration's `text_config`; empty for a model without parts
    """

    name: str
    kind: Kind
    config: Mapping[str, Any]
    model_type: str = ""
    auto: str = "AutoModelForCausalLM"
    text: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of its configuration."""
        return {**self.config, **({"text_config": dict(self.text)} if self.text else {})}


def _text(name: str, model_type: str = "", **more: Any) -> ModelFamily:
    return ModelFamily(name, "text", {**SIZES, **more}, model_type=model_type)


def _experts(name: str, **more: Any) -> ModelFamily:
    return ModelFamily(name, "experts", {**SIZES, **more})


def _pooling(name: str, model_type: str, auto: str, **more: Any) -> ModelFamily:
    return ModelFamily(name, "pooling", {**SIZES, **more}, model_type=model_type, auto=auto)


def _multimodal(name: str, text: Mapping[str, Any], **more: Any) -> ModelFamily:
    return ModelFamily(name, "multimodal", more, auto="AutoModelForImageTextToText", text={**SIZES, **text})


_FAMILIES = (
    _text("llama"),
    _text("mistral"),
    _text("qwen2"),
    _text("qwen3"),
    _text("gemma", head_dim=32),
    _text("gemma2", sliding_window=128, query_pre_attn_scalar=32),
    _text("gemma3_text", sliding_window=128, query_pre_attn_scalar=32),
    _text("phi3", sliding_window=None),
    _text("granite"),
    _text("cohere"),
    _text("cohere2", sliding_window=128),
    _text("exaone4", sliding_window=128),
    _text("nemotron"),
    _text("apertus"),
    _text("ernie4_5"),
    _text("glm4"),
    _text("opt", ffn_dim=96, word_embed_proj_dim=64),
    _text("hyperclovax"),
    _text("lfm2", **_LFM2, block_auto_adjust_ff_dim=False),
    _text("falcon_h1", mamba_d_ssm=64, mamba_n_heads=2, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1),
    _text(
        "nemotron_h", hybrid_override_pattern="M*-", layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3, mamba_num_heads=2, mamba_head_dim=32, ssm_state_size=16, n_groups=1,
    ),
    _text(
        "jamba", mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4, use_mamba_kernels=False,
    ),
    _text("granitemoehybrid", layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=96,
          mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2),
    _text("olmo_hybrid", **_LINEAR_ATTENTION),
    _text("olmo2"),
    _text("smollm3", tie_word_embeddings=False),
    _text("gpt_neox"),
    _text("starcoder2", sliding_window=None),
    _text("phi"),
    _text("gpt_bigcode", n_inner=96),
    ModelFamily("llama_tied", "text", {**SIZES, "tie_word_embeddings": True}, model_type="llama"),
    # Without experts, and with the one size of latent attention that vLLM's kernel for CPUs takes.
    _text("deepseek_v2_dense", "deepseek_v2", num_key_value_heads=2, first_k_dense_replace=2, n_routed_experts=4,
          num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, kv_lora_rank=512, q_lora_rank=None,
          qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, head_dim=64, n_group=1, topk_group=1),
    _experts("mixtral", num_local_experts=4, num_experts_per_tok=2),
    _experts("qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=32, decoder_sparse_step=1),
    _experts("qwen3_moe", **_EXPERTS, decoder_sparse_step=1),
    _experts("olmoe", num_experts=4, num_experts_per_tok=2),
    _experts("phimoe", num_local_experts=4, num_experts_per_tok=2),
    _experts("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=128),
    _experts("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    _experts("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0,
             moe_num_shared_experts=1),
    _experts("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
             first_k_dense_replace=1, n_shared_experts=1, n_group=1, topk_group=1),
    _experts("deepseek_v2", num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
             first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=32,
             qk_rope_head_dim=32, v_head_dim=32, n_group=1, topk_group=1),
    _experts("qwen3_next", **_EXPERTS, **_LINEAR_ATTENTION, shared_expert_intermediate_size=32),
    _experts("lfm2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1,
             **_LFM2),
    _experts("minimax_m2", num_local_experts=4, num_experts_per_tok=2, rotary_dim=16, scoring_func="sigmoid"),
    _multimodal("gemma3", {"sliding_window": 128, "query_pre_attn_scalar": 32},
                vision_config={**_VISION, "vision_use_head": False},
                mm_tokens_per_image=4, image_token_index=250, boi_token_index=251, eoi_token_index=252),
    _multimodal("llava", {"model_type": "llama"}, vision_config={**_VISION, "model_type": "clip_vision_model"},
                image_token_index=250, image_token_id=250),
    _multimodal("llava_next", {"model_type": "llama"}, vision_config={**_VISION, "model_type": "clip_vision_model"},
                image_token_index=250, image_token_id=250, image_grid_pinpoints=[[56, 112], [112, 56]]),
    _multimodal("paligemma", {"model_type": "gemma"}, vision_config={**_VISION, "model_type": "siglip_vision_model",
                "projection_dim": 64, "vision_use_head": False}, projection_dim=64, hidden_size=64,
                image_token_index=250, image_token_id=250),
    _multimodal("idefics3", {"model_type": "llama"}, vision_config=_VISION, image_token_id=250, scale_factor=2),
    _multimodal("smolvlm", {"model_type": "llama"}, vision_config=_VISION, image_token_id=250, scale_factor=2),
    _multimodal("mistral3", {"model_type": "mistral"}, vision_config={**_VISION, "model_type": "pixtral",
                "head_dim": 32}, image_token_index=250, image_token_id=250, spatial_merge_size=2),
    _multimodal("internvl", {"model_type": "qwen2"}, vision_config={**_VISION, "image_size": [56, 56],
                "patch_size": [14, 14]}, image_token_id=250),
    _multimodal("qwen2_vl", {"rope_parameters": _MROPE}, vision_config={**_QWEN_VISION, "embed_dim": 64,
                "hidden_size": 64, "mlp_ratio": 2}, image_token_id=250, video_token_id=251,
                vision_start_token_id=252, vision_end_token_id=253),
    _multimodal("qwen2_5_vl", {"rope_parameters": _MROPE}, vision_config={**_QWEN_VISION, "window_size": 112,
                "fullatt_block_indexes": [1]}, image_token_id=250, video_token_id=251, vision_start_token_id=252,
                vision_end_token_id=253),
    _multimodal("qwen3_vl", {"rope_parameters": _MROPE}, vision_config=_QWEN3_VISION, image_token_id=250,
                video_token_id=251, vision_start_token_id=252, vision_end_token_id=253),
    _multimodal("qwen3_vl_moe", {**_EXPERTS, "norm_topk_prob": True, "rope_parameters": _MROPE},
                vision_config=_QWEN3_VISION,
                image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253),
    _multimodal("qwen3_5", {**_LINEAR_ATTENTION, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
                vision_config=_QWEN3_5_VISION, image_token_id=250, video_token_id=251, vision_start_token_id=252,
                vision_end_token_id=253),
    _multimodal("qwen3_5_moe", {**_EXPERTS, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 32,
                "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}, vision_config=_QWEN3_5_VISION,
                image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253),
    _multimodal("llama4", {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
                "interleave_moe_layer_step": 2, "moe_layers": [1], "no_rope_layers": [1, 1]},
                vision_config={**_VISION, "vision_output_dim": 64, "projector_input_dim": 64,
                "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5}, image_token_index=250,
                boi_token_index=251, eoi_token_index=252),
    _multimodal("glm4v", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 0.5, "rope_theta": 10000.0}}, vision_config={**_QWEN_VISION,
                "num_heads": 2, "image_size": 56}, image_token_id=250, video_token_id=251),
    _multimodal("lfm2_vl", {"model_type": "lfm2", **_LFM2,
                "block_auto_adjust_ff_dim": False},
                vision_config={**_VISION, "model_type": "siglip2_vision_model", "vision_use_head": False,
                "num_patches": 16}, image_token_id=250),
    _pooling("qwen3_embedding", "qwen3", "AutoModel"),
    _pooling("llama_embedding", "llama", "AutoModel"),
    _pooling("roberta_classifier", "roberta", "AutoModelForSequenceClassification", num_labels=3, type_vocab_size=1),
    _pooling("qwen3_classifier", "qwen3", "AutoModelForSequenceClassification", num_labels=3),
)  # fmt: skip

FAMILIES: Mapping[str, ModelFamily] = {family.name: family for family in _FAMILIES}
