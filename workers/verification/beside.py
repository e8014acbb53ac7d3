"""What lies beside an adapter's two files: one table of names, and what the tokenizer's files among them say.

Engines read the two files alone, and so does PEFT. A file beside them may still be a part of what was trained: such an
adapter is refused, since the engine would answer without that part.

source   vLLM 0.32 lora/lora_model.py `from_local_checkpoint`, v1/engine/input_processor.py `_validate_lora` (the base
         model's tokenizer for all); PEFT 0.21 utils/save_and_load.py `load_peft_weights`; what trainers write:
         Transformers 5.19, TRL, Axolotl, LLaMA-Factory, ms-swift, LLaVA, LongLoRA, sentence-transformers
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.tokenizer.chat import added_tokens, chat_templates, named_tokens
from lorafleet.tokenizer.messages import Untokenizable
from workers.core.errors import SourceError, sendable
from workers.verification.adapter_files import is_adapter_file

MOST_TEXT_BYTES = 2 << 20
"""Of a text that is compared, only its beginning is read: `tokenizer.json` names its added tokens there."""

_GENERATION = "generation_config.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_NOT_COMPARED = "its tokenizer was not compared with the base model's, whose tokenizer.json is not on this disk"
_NAMES_SHOWN = 5
_MOST_CHARACTERS = 80


class FileUse(Enum):
    """What becomes of a file beside an adapter's two files.

    HARMLESS   it changes no answer, with the adapter or without
    COMPARED   it is a copy of a text of the base model's: another text is refused, or named in a note
    CARRIED    it goes with the adapter to every worker, and is no part of its digest
    NOTED      no engine reads it; a note names it
    REFUSED    it holds a part of what was trained, so answers without it are others
    """

    HARMLESS = "harmless"
    COMPARED = "compared"
    CARRIED = "carried"
    NOTED = "noted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KnownName:
    """The files and folders (with `/` behind their name) of one kind. `says`: what they are, for notes and errors."""

    names: re.Pattern[str]
    use: FileUse
    says: str = ""


def _known(use: FileUse, says: str, *expressions: str) -> KnownName:
    """The entry of names that match one of the expressions as a whole."""
    return KnownName(re.compile("|".join(expressions), re.IGNORECASE), use, says)


_TENSORS = r"\.(?:safetensors|bin|pt|pth)"

KNOWN_NAMES: tuple[KnownName, ...] = (
    _known(FileUse.REFUSED, "trained embeddings of added tokens", rf"new_embeddings{_TENSORS}"),
    _known(
        FileUse.REFUSED,
        "whole modules that were trained with it, such as a projector",
        rf"non_lora_(?:trainables|state_dict|weights){_TENSORS}",
        rf"(?:mm_)?projector{_TENSORS}",
    ),
    _known(FileUse.REFUSED, "embeddings and norms that were trained with it", rf"trainable_params{_TENSORS}"),
    _known(FileUse.REFUSED, "a whole module that was trained with it", rf"(?:embed_tokens|lm_head|vit){_TENSORS}"),
    _known(FileUse.COMPARED, "a tokenizer", r"(?:added_tokens|tokenizer|tokenizer_config|special_tokens_map)\.json"),
    _known(FileUse.COMPARED, "a chat template", r"chat_template\.(?:jinja|json)"),
    _known(FileUse.COMPARED, "defaults of sampling", re.escape(_GENERATION)),
    _known(FileUse.CARRIED, "the trainer's log-probabilities", re.escape(ACCEPTANCE_NAME)),
    _known(
        FileUse.NOTED,
        "pickled weights beside adapter_model.safetensors, which wins",
        r"adapter_model\.(?:bin|pt|pth)",
    ),
    _known(
        FileUse.NOTED,
        "weights in parts beside adapter_model.safetensors, which wins",
        r"adapter_model-\d+-of-\d+\.(?:safetensors|bin)",
    ),
    _known(
        FileUse.NOTED,
        "a value head, which reward training uses and no engine",
        rf"(?:value_head|v_head|vhead_params){_TENSORS}",
    ),
    _known(
        FileUse.NOTED,
        "a whole model (merged, or a full fine-tune); served is the base model with the adapter",
        r"(?:pytorch_)?model(?:[-.]\d+-of-\d+)?\.(?:safetensors|bin)",
        r"consolidated\.\d+\.pth?",
    ),
    _known(FileUse.NOTED, "a layer behind the pooling; served are the base model's own", r"\d+_Dense/"),
    # A trainer's state, from which training goes on.
    _known(
        FileUse.HARMLESS,
        "a trainer's state",
        r"(?:optimizer|scheduler|scaler|sampler|dataloader)(?:[_-]?\d+)?\.(?:pt|pth|bin|safetensors)",
        r"(?:rng_state|random_states)(?:_\d+)?\.(?:pth|pkl)",
        r"training_args\.(?:bin|json|yaml)|trainer_(?:state|config)\.json|latest|.*zero_pp_rank.*\.pt|mp_rank.*\.pt",
        r"(?:checkpoint|global_step|epoch|step)[-_]?\d+/|(?:pytorch_model_fsdp|optimizer)_\d+/",
        r"(?:all|train|eval|test|predict)_results\.json|metrics\.json|(?:sft_|training_)?args\.json|.*\.jsonl",
        r"events\.out\.tfevents\..*|.*\.(?:log|csv|yaml|yml|toml|sh|py|ipynb|lock|cfg|ini)|(?:runs|logs|wandb|eval)/",
        r"(?:additional|train|run|peft|unsloth|axolotl)_config\.json|configuration\.json|metadata\.json",
    ),
    # The base model's own configuration, and vocabularies that `tokenizer.json` has, too.
    _known(
        FileUse.HARMLESS,
        "a copy of the base model's",
        r"config\.json|.*\.index\.json|(?:video_)?pre_?processor_config\.json|processor_config\.json",
        r"vocab\.(?:json|txt)|merges\.txt|(?:sentencepiece\.bpe|spiece|tokenizer)\.model|.*\.tiktoken",
        r"modules\.json|sentence_.*_config\.json|config_sentence_transformers\.json|\d+_(?:Pooling|Normalize)/",
    ),
    _known(
        FileUse.HARMLESS,
        "a text or picture for people",
        r"\..*|.*\.(?:md|rst|txt|html|pdf|png|jpe?g|gif|svg|webp|mp4)|(?:LICEN[CS]E|NOTICE|README|USE_POLICY)[^.]*",
        r"(?:images|assets|figures|samples|examples|docs|__pycache__)/|Thumbs\.db",
    ),
)  # fmt: skip
"""The first entry that matches a name counts."""

_UNKNOWN_WEIGHTS = KnownName(
    re.compile(r".*\.(?:safetensors|bin|pt|pth|ckpt|gguf|npz|npy|onnx|h5|pkl)", re.IGNORECASE),
    FileUse.NOTED,
    "weights that neither engines nor PEFT read",
)
_UNKNOWN_FOLDER = KnownName(re.compile(r".*/"), FileUse.NOTED, "folders, in which nothing is read")
_UNKNOWN = KnownName(re.compile(".*"), FileUse.NOTED, "not known here, and read by no engine")


def known_name(name: str) -> KnownName:
    """The entry of a file's name, or of a folder's with `/` behind it; every name has one."""
    rest = (_UNKNOWN_WEIGHTS, _UNKNOWN_FOLDER, _UNKNOWN)
    return next((known for known in (*KNOWN_NAMES, *rest) if known.names.fullmatch(name)), _UNKNOWN)


def read_names(names: Collection[str]) -> list[str]:
    """Those of the files whose beginning a source reads, in order: to compare it, or to carry it with the adapter."""
    return sorted(name for name in names if known_name(name).use in {FileUse.COMPARED, FileUse.CARRIED})


def is_fleet_file(name: str) -> bool:
    """Whether workers of a fleet give each other the file with an adapter."""
    return is_adapter_file(name) or known_name(name).use is FileUse.CARRIED


ASKED_NAMES = (
    ACCEPTANCE_NAME,
    "new_embeddings.safetensors", "new_embeddings.bin", "non_lora_trainables.bin", "trainable_params.bin",
    "added_tokens.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
"""Names that are asked for, one by one, where a source has no list of its files."""


def notes_on_files(names: Collection[str], folders: Collection[str] = ()) -> tuple[str, ...]:
    """What an operator should know of the files beside an adapter's: a sentence for each kind, none if all is harmless.

    names, folders  of its folder, without the adapter's own files
    raises          SourceError `adapter_file_unsupported` for a part of what was trained
    """
    noted: dict[str, list[str]] = {}
    for name in sorted({*names} - {*folders, ""}) + sorted(f"{folder}/" for folder in folders if folder):
        known = known_name(name)
        if known.use is FileUse.REFUSED:
            message = f"{_shown(name)} beside the adapter's files: {known.says}, which no engine reads"
            accepted = "accepted is LoRA alone: merge it into the base model and serve that"
            advice = "or delete the file if answers do not need it"
            raise SourceError("adapter_file_unsupported", f"{message}; {accepted}, {advice}")
        if known.use is FileUse.NOTED:
            noted.setdefault(known.says, []).append(name)
    return tuple(f"not served: {_listed(found)} ({says})" for says, found in noted.items())


def text_head(path: Path) -> bytes:
    """The beginning of a text beside an adapter. Raises OSError."""
    with path.open("rb") as file:
        return file.read(MOST_TEXT_BYTES)


def notes_on_texts(texts: Mapping[str, bytes], base: Path | None) -> tuple[str, ...]:
    """What an operator should know of texts beside an adapter that differ from the base model's. Blocking.

    texts   the beginning of each, by name
    base    the folder with the engine's own; None: it is not on this disk
    raises  SourceError `adapter_file_unsupported` for a tokenizer with tokens that the engine's lacks
    """
    own = {name: text.decode(errors="replace") for name, text in texts.items()}
    # Padding is in no prompt.
    tokens = sorted(_named_as_added(own) - {_pad_token(own)})
    known = _tokens_of(base) if base is not None and tokens else None
    if known is not None and (missing := [token for token in tokens if token not in known]):
        message = (
            f"its tokenizer adds {_listed(missing)}, which the engine's lacks: prompts would have other tokens than"
        )
        accepted = "in training; accepted are adapters for the base model's own tokens: start the engine with the"
        advice = "adapter's tokenizer (`--tokenizer`), or delete these files if training used no such token"
        found = ", ".join(name for name in sorted(own) if known_name(name).use is FileUse.COMPARED)
        raise SourceError("adapter_file_unsupported", f"{found}: {message} {accepted} {advice}")
    damaged = [name for name, text in own.items() if name.endswith(".json") and not text.lstrip().startswith("{")]
    notes = [f"not compared with the base model's: {_listed(damaged)} (no JSON object)"] if damaged else []
    if known is None and tokens:
        notes.append(_NOT_COMPARED)
    return (*notes, *(() if base is None else (*_notes_on_template(own, base), *_notes_on_generation(own, base))))


class _AddedToken(msgspec.Struct):
    content: str = ""


class _Model(msgspec.Struct):
    vocab: dict[str, Any] | list[list[Any]] = msgspec.field(default_factory=dict)


class _Tokenizer(msgspec.Struct):
    """What a `tokenizer.json` says of its tokens."""

    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list)
    model: _Model = msgspec.field(default_factory=_Model)


def _tokens_of(base: Path) -> Collection[str] | None:
    """Every token of the base model's tokenizer; None if it has no `tokenizer.json` that can be read."""
    try:
        found = msgspec.json.decode((base / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError):
        return None
    vocabulary = found.model.vocab
    known = {token.content for token in found.added_tokens} | _named_as_added(_texts_in(base))
    return known.union(vocabulary if isinstance(vocabulary, dict) else (str(row[0]) for row in vocabulary if row))


def _texts_in(base: Path) -> dict[str, str]:
    """The beginnings of the base model's texts that are compared, but for its `tokenizer.json`."""
    found = {}
    for name in (*_CONFIGS, "added_tokens.json", "chat_template.jinja", "chat_template.json", _GENERATION):
        with suppress(OSError):
            found[name] = text_head(base / name).decode(errors="replace")
    return found


def _named_as_added(texts: Mapping[str, str]) -> set[str]:
    """Every token that one of a tokenizer's files names as added; a file that cannot be read names none."""
    listed = _object(texts, "added_tokens.json")
    found = {*_tokens_at_head(texts.get("tokenizer.json", "")), *(name for name in listed if type(listed[name]) is int)}
    with suppress(Untokenizable):
        found.update(added_tokens({name: texts[name] for name in _CONFIGS if name in texts}))
    return found


def _tokens_at_head(text: str) -> Iterator[str]:
    """The added tokens at the beginning of a `tokenizer.json`, whose end may be missing."""
    decoder, at = json.JSONDecoder(), text.find('"added_tokens"')
    at = text.find("[", at) + 1 if at >= 0 else 0
    while at:
        begin = text.find("{", at)
        if begin < 0 or "]" in text[at:begin]:
            return
        try:
            token, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return
        if isinstance(token.get("content"), str):
            yield token["content"]


def _pad_token(texts: Mapping[str, str]) -> str:
    """The padding token, which is in no prompt; "" without one."""
    config, special_tokens = (_object(texts, name) for name in _CONFIGS)
    return named_tokens(config, special_tokens).get("pad_token", "")


def chat_template_digests(base: Path | None) -> frozenset[str]:
    """sha256 of each chat template of the engine's tokenizer; empty where none can be read. Blocking."""
    templates = {} if base is None else _templates(_texts_in(base))
    return frozenset(hashlib.sha256(template.encode()).hexdigest() for template in templates.values())


def _notes_on_template(own: Mapping[str, str], base: Path) -> Iterator[str]:
    """A note if the adapter has another chat template than the base model."""
    template = _templates(own)
    if template and template != _templates(_texts_in(base)):
        yield "its chat template differs from the base model's, by which the engine renders chats (see --chat-template)"


def _templates(texts: Mapping[str, str]) -> Mapping[str, str]:
    """The chat templates in a tokenizer's texts, without white space around them."""
    try:
        found = chat_templates(texts, _object(texts, "tokenizer_config.json"))
    except (Untokenizable, KeyError, TypeError):
        return {}
    return {name: template.strip() for name, template in found.items()}


def _notes_on_generation(own: Mapping[str, str], base: Path) -> Iterator[str]:
    """A note if the adapter has other defaults of sampling than the base model."""
    if _GENERATION not in own:
        return
    about = ("transformers_version", "_from_model_config")
    mine, base_models = (_object(texts, _GENERATION) for texts in (own, _texts_in(base)))
    differing = [key for key, value in sorted(mine.items()) if key not in about and base_models.get(key) != value]
    if differing:
        yield f"not served: {_listed(differing)} of {_GENERATION}; the engine's defaults are the base model's"


def _object(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """The JSON object in a text; empty without the text, or for any other."""
    try:
        found = json.loads(texts.get(name, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(names: Collection[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown, more = [_shown(name) for name in list(names)[:_NAMES_SHOWN]], len(names) - _NAMES_SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _shown(name: str) -> str:
    """A name from somebody else's folder, for messages: short, and without control characters."""
    text = sendable(name[:_MOST_CHARACTERS])
    return text if text.isprintable() else ascii(text)
