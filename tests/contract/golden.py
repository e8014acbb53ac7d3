"""Shapes of vLLM 0.32.0's answers on the CPU, with its keys in order; `...` is a varying value."""

from typing import Any

PERMISSION = {
    "id": "str", "object": "model_permission", "created": "int", "allow_create_engine": False, "allow_sampling": True,
    "allow_logprobs": True, "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
    "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip

CHAT = {
    "id": "str", "object": "chat.completion", "created": "int", "model": "str",
    "choices": [{
        "index": "int",
        "message": {
            "role": "assistant", "content": "str", "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "reasoning": None,
        },
        "logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None, "routed_experts": None,
    }],
    "service_tier": None, "system_fingerprint": "str",
    "usage": {
        "prompt_tokens": "int", "total_tokens": "int", "completion_tokens": "int",
        "prompt_tokens_details": {"cached_tokens": "int", "created_cache_tokens": "int", "multimodal_tokens": None},
        "completion_tokens_details": None,
    },
    "prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None, "kv_transfer_params": None,
    "ec_transfer_params": None, "metrics": None,
}  # fmt: skip

COMPLETION = {
    "id": "str", "object": "text_completion", "created": "int", "model": "str",
    "choices": [{
        "index": "int", "text": "str", "logprobs": None, "finish_reason": "length", "stop_reason": None,
        "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None,
    }],
    "service_tier": None, "system_fingerprint": "str",
    "usage": {
        "prompt_tokens": "int", "total_tokens": "int", "completion_tokens": "int",
        "prompt_tokens_details": {"cached_tokens": "int", "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    },
    "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
}  # fmt: skip

CHUNK = {"id": "str", "object": "chat.completion.chunk", "created": "int", "model": "str"}
CHAT_CHUNKS = [
    CHUNK | {
        "choices": [{
            "index": "int", "delta": {"role": "assistant", "content": "str"}, "logprobs": None, "finish_reason": None,
        }],
        "prompt_token_ids": None, "prompt_text": None,
    },
    CHUNK | {
        "choices": [{
            "index": "int", "delta": {"content": "str"}, "logprobs": None, "finish_reason": None, "token_ids": None,
        }],
    },
    CHUNK | {
        "choices": [{
            "index": "int", "delta": {"content": "str"}, "logprobs": None, "finish_reason": "length",
            "stop_reason": None, "token_ids": None,
        }],
        "system_fingerprint": "str",
    },
]  # fmt: skip
CHAT_USAGE_CHUNK = CHUNK | {
    "choices": [],
    "usage": {
        "prompt_tokens": "int", "total_tokens": "int", "completion_tokens": "int",
        "prompt_tokens_details": {"cached_tokens": "int", "created_cache_tokens": "int"},
    },
    "system_fingerprint": "str",
}  # fmt: skip

COMPLETION_CHUNK = CHUNK | {
    "object": "text_completion",
    "choices": [{
        "index": "int", "text": "str", "logprobs": None, "finish_reason": None, "stop_reason": None,
        "prompt_token_ids": None, "token_ids": None,
    }],
}  # fmt: skip

BLOCK_STORED = {
    "type": "BlockStored", "block_hashes": ["int"], "parent_block_hash": None, "token_ids": ["int"],
    "block_size": "int", "lora_id": None, "medium": "str", "lora_name": None, "extra_keys": [None],
    "group_idx": "int", "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
BLOCK_REMOVED = {"type": "BlockRemoved", "block_hashes": ["int"], "medium": "str", "group_idx": "int"}

# The metrics that routers and agents read, each a prefix of a line.
METRICS = (
    "process_start_time_seconds ",
    'vllm:num_requests_running{engine="0",model_name="tiny-qwen"} ',
    'vllm:num_requests_waiting{engine="0",model_name="tiny-qwen"} ',
    'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny-qwen",reason="capacity"} ',
    'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny-qwen",reason="deferred"} ',
    'vllm:kv_cache_usage_perc{engine="0",model_name="tiny-qwen"} ',
    'vllm:prefix_cache_queries_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:prefix_cache_hits_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:num_preemptions_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:prompt_tokens_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:prompt_tokens_cached_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:generation_tokens_total{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny-qwen"} ',
    'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny-qwen"} ',
    'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny-qwen"} ',
    'vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="tiny-qwen"} ',
    'vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="tiny-qwen"} ',
    'vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_decode_time_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_inference_time_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_prompt_tokens_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:request_generation_tokens_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:iteration_tokens_total_sum{engine="0",model_name="tiny-qwen"} ',
    'vllm:lora_requests_info{max_lora="2",running_lora_adapters=',
    "vllm:cache_config_info{",
)


def fits(value: Any, golden: Any, at: str = "") -> str | None:
    """Where and how `value` differs from `golden`; None if it does not."""
    if isinstance(golden, dict):
        if not isinstance(value, dict) or list(value) != list(golden):
            return f"{at}: {list(value) if isinstance(value, dict) else value!r}, expected keys {list(golden)}"
        found = (fits(value[key], golden[key], f"{at}.{key}") for key in golden)
    elif isinstance(golden, list):
        if not isinstance(value, list) or bool(value) != bool(golden):
            return f"{at}: {value!r}, expected a list like {golden}"
        found = (fits(item, golden[0], f"{at}[{index}]") for index, item in enumerate(value))
    else:
        same = value == golden or (isinstance(golden, str) and type(value).__name__ == golden)
        return None if same else f"{at}: {value!r}, expected {golden!r}"
    return next((difference for difference in found if difference), None)
