"""The demo's base model and adapters, generated from fixed seeds: no download, no training.

    python -m lorafleet.local.tiny_model DIR      # DIR/tiny-qwen, DIR/adapters/sql-expert/v1, ...

The base model is a real Qwen2 (grouped-query attention, rotary positions, ChatML template) of a few MB with random
weights and a tokenizer trained here from `tiny_corpus.txt`. Its answers are words without sense. They sometimes end by
themselves and differ for every prompt and adapter, which is what routing, caching and loading need.

Needs numpy, safetensors and tokenizers (the `demo` extra). No torch, no transformers.
"""

import functools
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import safetensors
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Array: TypeAlias = NDArray[np.float32]

MODEL_NAME: Final = "tiny-qwen"
LAYERS: Final = 4
HIDDEN: Final = 256
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = HIDDEN // HEADS
FEED_FORWARD: Final = 512
VOCABULARY: Final = 4096
MAX_POSITIONS: Final = 32768
SEED: Final = 20

# As in Qwen2.5: the first three are special (hidden from text), the tool marks are ordinary text.
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL: Final = (END_OF_TEXT, IM_START, IM_END)
TOOL_MARKS: Final = ("<tool_call>", "</tool_call>")

# Qwen2's pre-tokenizer. Transformers 5 uses it for every Qwen2, whatever tokenizer.json has (transformers 5.19
# models/qwen2/tokenization_qwen2.py), so another one would give the engine other ids than ours.
QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# lora_id -> (rank, the corpus section whose words it prefers)
ADAPTERS: Final[Mapping[str, tuple[int, str]]] = {
    "sql-expert/v1": (8, "sql"),
    "python-expert/v1": (16, "python"),
    "legal/v2": (8, "legal"),
}
PREFERRED_WORDS: Final = (
    48  # words an adapter prefers: few enough that their directions barely overlap in 256 dimensions
)

# ChatML as Qwen2.5-Instruct renders it: default system prompt, tools in the system turn, tool answers in a user turn.
CHAT_TEMPLATE: Final = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
    {{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments " }}
    {{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
    {{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".lstrip("\n")


def _ignore_progress(_line: str) -> None:
    """Print nothing: no progress is shown."""


def make_model(into: Path, *, progress: Callable[[str], None] = _ignore_progress) -> Path:
    """Create the base model in `into`, unless it exists, and return the folder; takes under a second.

    The folder appears whole or not at all, also if several processes create it at once. The bytes are always the same.
    """
    if (into / "config.json").is_file():
        return into
    progress(f"creating the tiny base model in {into}")
    with folder_made_whole(into) as folder:
        # Written without the libraries' own functions, whose errors for a full disk differ.
        (folder / "tokenizer.json").write_text(demo_tokenizer().to_str(pretty=True), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        _write_json(folder / "config.json", _CONFIG)
        _write_json(folder / "generation_config.json", _GENERATION_CONFIG)
        _write_tensors(folder / "model.safetensors", _base_weights())
    return into


def make_adapters(into: Path, *, progress: Callable[[str], None] = _ignore_progress) -> list[Path]:
    """Create the demo's three adapters, each in the folder `into / lora_id`, unless they exist."""
    return [
        make_adapter(into, lora_id, rank=rank, section=section, progress=progress)
        for lora_id, (rank, section) in ADAPTERS.items()
    ]


def make_adapter(
    into: Path,
    lora_id: str,
    *,
    rank: int = 8,
    seed: int | None = None,
    section: str = "prose",
    base_model: str = MODEL_NAME,
    progress: Callable[[str], None] = _ignore_progress,
) -> Path:
    """Create one adapter for the tiny model in `into / lora_id`, in PEFT's layout, and return the folder.

    An existing one is left as it is. Raises OSError.

    seed     of the weights; None derives it from `lora_id`, so that every name is another adapter
    section  part of the corpus with its preferred words: prose, sql, python, legal, chat
    """
    folder = into / lora_id
    if (folder / "adapter_config.json").is_file():
        return folder
    progress(f"creating adapter {lora_id} (rank {rank})")
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(lora_id.encode()).digest()[:8], "big")
    with folder_made_whole(folder) as new:
        _write_tensors(new / "adapter_model.safetensors", _adapter_weights(seed, rank, section))
        _write_json(new / "adapter_config.json", _adapter_config(rank, base_model))
    return folder


# --- tokenizer ---------------------------------------------------------------------------------------------------


@functools.cache
def _corpus_sections() -> dict[str, str]:
    """The corpus by section: {"prose": text, "sql": text, ...}; a section begins with a line `# name`."""
    text = resources.files("lorafleet.local").joinpath("tiny_corpus.txt").read_text(encoding="utf-8")
    parts = re.split(r"^# (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def demo_tokenizer() -> Tokenizer:
    """A new byte-level BPE tokenizer, trained on the corpus, with the special tokens and tool marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TOOL_MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    paragraphs = [p for text in _corpus_sections().values() for p in text.split("\n\n")]
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TOOL_MARKS])
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    return tokenizer


@functools.cache
def word_tokens() -> dict[str, int]:
    """Whole words of the corpus that are one token with a space before them: {"customer": 812, ...}, in id order."""
    words = set(re.findall(r"[^\W\d_]{2,}", "".join(_corpus_sections().values())))
    found = {}
    tokenizer = demo_tokenizer()
    for token in range(VOCABULARY - len(SPECIAL) - len(TOOL_MARKS)):
        text = tokenizer.decode([token])
        if text.startswith(" ") and text[1:] in words:
            found[text[1:]] = token
    return found


# --- base model --------------------------------------------------------------------------------------------------

_SHAPES: Final[Mapping[str, tuple[int, int]]] = {  # module -> [out, in]
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}
# Gains over 1/sqrt(fan-in), found by trial: attention sharp enough that the whole prompt matters, and each block adds
# about as much as the token itself, so that greedy text does not fall into a loop.
_GAINS: Final[Mapping[str, float]] = {
    "self_attn.q_proj": 1.5,
    "self_attn.k_proj": 1.5,
    "self_attn.v_proj": 1.2,
    "self_attn.o_proj": 2.0,
    "mlp.gate_proj": 1.0,
    "mlp.up_proj": 1.0,
    "mlp.down_proj": 1.5,
}


def _base_weights() -> dict[str, Array]:
    """The base model's tensors by name: random values of a fixed seed, so always the same."""
    rng = np.random.default_rng(SEED)
    weights = {"model.embed_tokens.weight": _normal_tensor(rng, (VOCABULARY, HIDDEN), 1.0)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for module, (rows, columns) in _SHAPES.items():
            weights[f"{prefix}{module}.weight"] = _normal_tensor(rng, (rows, columns), _GAINS[module] / columns**0.5)
        for module in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{module}.bias"] = _normal_tensor(rng, (_SHAPES[f"self_attn.{module}"][0],), 0.1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = lm_head_weight()
    return weights


@functools.cache
def lm_head_weight() -> Array:
    """The lm_head matrix [VOCABULARY, HIDDEN].

    Rows of whole words have a large norm, so mostly whole words are generated, and end-of-turn now and then.
    """
    rng = np.random.default_rng(SEED + 1)
    length = np.full(VOCABULARY, 0.3)
    length[list(word_tokens().values())] = 1.0
    length[demo_tokenizer().token_to_id(IM_END)] = _END_LENGTH
    # 3 / sqrt(HIDDEN): logits of standard deviation 3, so that temperature 1 still prefers some words to others.
    rows: Array = (_normal_tensor(rng, (VOCABULARY, HIDDEN), 3 / HIDDEN**0.5) * length[:, None]).astype(np.float32)
    return rows


_END_LENGTH: Final = 1.1  # so that base answers end after some hundred tokens; adapters' answers go on to max_tokens


# --- adapters ----------------------------------------------------------------------------------------------------


def _adapter_weights(seed: int, rank: int, section: str) -> dict[str, Array]:
    """Random pairs A [rank, in], B [out, rank] for every linear layer; the last down_proj prefers a section's words."""
    rng = np.random.default_rng([SEED, seed])
    weights = {}
    for layer in range(LAYERS):
        for module, (rows, columns) in _SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}."
            weights[prefix + "lora_A.weight"] = _normal_tensor(rng, (rank, columns), 1 / columns**0.5)
            weights[prefix + "lora_B.weight"] = _normal_tensor(rng, (rows, rank), 0.3 / rank**0.5)
    last = f"base_model.model.model.layers.{LAYERS - 1}.mlp.down_proj."
    # The last block's output gets a changing mix of the preferred words' own output rows: with either sign of the mix
    # some of these words gain most.
    rows_of_words = lm_head_weight()[_preferred_words(rng, section)]
    mix = rng.standard_normal((PREFERRED_WORDS, rank)) / rank**0.5
    towards = rows_of_words.T @ mix
    weights[last + "lora_B.weight"] = (towards * _PREFERENCE / np.sqrt((towards**2).mean())).astype(np.float32)
    return weights


_PREFERENCE: Final = 5.0  # so that most words of an answer are preferred ones, and the prompt decides which


def _preferred_words(rng: np.random.Generator, section: str) -> list[int]:
    """Token ids of 48 words from this section, preferably words that no other section has; raises ValueError."""
    everything = _corpus_sections()
    if section not in everything:
        raise ValueError(f"no section {section!r} in the corpus; there are {sorted(everything)}")
    here = set(re.findall(r"[^\W\d_]{3,}", everything[section]))
    elsewhere = set(re.findall(r"[^\W\d_]{3,}", "".join(t for s, t in everything.items() if s != section)))
    tokens = word_tokens()
    only_here, also_elsewhere = here - elsewhere, here & elsewhere
    own = [t for word, t in tokens.items() if word in only_here]
    shared = [t for word, t in tokens.items() if word in also_elsewhere]
    rng.shuffle(own)
    rng.shuffle(shared)
    return (own + shared)[:PREFERRED_WORDS]


def _adapter_config(rank: int, base_model: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for an adapter of this rank."""
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [module.split(".")[1] for module in _SHAPES],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


# --- files -------------------------------------------------------------------------------------------------------


def _special_token_ids(*tokens: str) -> list[int]:
    """Token ids of special tokens and tool marks."""
    return [VOCABULARY - len(SPECIAL) - len(TOOL_MARKS) + (*SPECIAL, *TOOL_MARKS).index(token) for token in tokens]


_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": _special_token_ids(END_OF_TEXT)[0],
    "dtype": "bfloat16",
    "eos_token_id": _special_token_ids(IM_END)[0],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": FEED_FORWARD,
    "max_position_embeddings": MAX_POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
_GENERATION_CONFIG: Final[Mapping[str, Any]] = {
    "bos_token_id": _special_token_ids(END_OF_TEXT)[0],
    "eos_token_id": _special_token_ids(IM_END, END_OF_TEXT),
    "pad_token_id": _special_token_ids(END_OF_TEXT)[0],
}
_TOKENIZER_CONFIG: Final[Mapping[str, Any]] = {
    "add_prefix_space": False,
    "additional_special_tokens": [IM_START, IM_END],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": IM_END,
    "errors": "replace",
    "model_max_length": MAX_POSITIONS,
    "pad_token": END_OF_TEXT,
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}


@contextmanager
def folder_made_whole(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` when the block succeeds; dropped if `target` exists by then.

    Raises OSError if it cannot be renamed and `target` is missing or empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield new
        new.chmod(0o755)  # mkdtemp's 0700 would hide it from an engine that runs as another user
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir() or not any(target.iterdir()):
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file in bfloat16, which numpy does not have.

    That is the upper half of a float32, rounded to nearest even.
    """
    halves = {}
    for name, tensor in tensors.items():
        bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
        halves[name] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=half.shape, data_ptr=half.ctypes.data, data_len=half.nbytes
        )
        for name, half in halves.items()
    }
    path.write_bytes(safetensors.serialize(specs, metadata={"format": "pt"}))
    path.chmod(0o644)


def _normal_tensor(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> Array:
    """A float32 tensor of random normal values with mean 0 and this standard deviation."""
    return (rng.standard_normal(shape) * std).astype(np.float32)


def main(argv: list[str]) -> int:
    """Create the model and its adapters in the folder that `argv` names, and print each; status 0, or 2 on misuse."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m lorafleet.local.tiny_model DIR\n")
        return 2

    def say(line: str) -> None:
        """Print a line."""
        sys.stdout.write(line + "\n")

    root = Path(argv[0])
    say(f"base model: {make_model(root / MODEL_NAME, progress=say)}")
    for folder in make_adapters(root / "adapters", progress=say):
        say(f"adapter: {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
