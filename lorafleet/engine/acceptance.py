"""Acceptance files: log-probabilities that a trainer computed, and whether an engine computes the same.

A file `acceptance.jsonl` beside an adapter's files has one line about the trainer, then one line a prompt:

    {"format": "lorafleet-acceptance/1", "model": "org/base", "dtype": "bfloat16", "libraries": {"peft": "0.19"}}
    {"prompt": [1, 2, 3, ...], "logprobs": [-0.5, -2.1, ...], "base_logprobs": [-0.7, -2.0, ...]}

`logprobs` has the log-probability of each token of the prompt but the first, under the adapter; `base_logprobs` has the
same without it. An engine that is asked for the same numbers differs from the trainer by noise: other kernels, another
dtype, another batch. The base model's own difference is the measure of that noise, on the very same tokens.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from orchestrator.model.acceptance import AdapterAcceptance, Likeness

FILE_NAME: Final = "acceptance.jsonl"
FORMAT: Final = "lorafleet-acceptance/1"
MOST_PROMPTS: Final = 3
MOST_TOKENS: Final = 256
"""Of a prompt. An engine holds the logits of a whole prompt at once: 160 MB at a vocabulary of 150,000."""
LEAST_TOKENS: Final = 8
MOST_BYTES: Final = 128 << 10
_MOST_LIBRARIES = 16

Text = Annotated[str, msgspec.Meta(max_length=200)]
Logprob = Annotated[float, msgspec.Meta(ge=-1e4, le=1e-3)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Logprobs: TypeAlias = Sequence[float]
T = TypeVar("T")


class AcceptanceError(ValueError):
    """An acceptance file breaks a rule of its format; the text names the line, the rule and what is accepted."""


class Trainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line: what computed the numbers. Only `dtype` has a part in the comparison.

    model          name or path of the base model, for people
    dtype          of the trainer's computation, such as bfloat16
    libraries      name -> version
    adapter        digest of the adapter's files, if known: names the version in a message
    chat_template  sha256 of the chat template in training; another one at the engine is noted, and decides nothing
    """

    format: str = FORMAT
    model: Text = ""
    dtype: Text = ""
    libraries: dict[Text, Text] = {}
    adapter: Text = ""
    chat_template: Text = ""


class CertifiedPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, and the log-probability of each of its tokens but the first, with the adapter and without."""

    prompt: tuple[TokenId, ...]
    logprobs: tuple[Logprob, ...]
    base_logprobs: tuple[Logprob, ...]

    def __post_init__(self) -> None:
        if not LEAST_TOKENS <= len(self.prompt) <= MOST_TOKENS:
            raise ValueError(f"prompt has {len(self.prompt)} tokens; accepted are {LEAST_TOKENS} to {MOST_TOKENS}")
        for name, numbers in (("logprobs", self.logprobs), ("base_logprobs", self.base_logprobs)):
            if len(numbers) != len(self.prompt) - 1:
                expected = f"expected {len(self.prompt) - 1}: one for each token but the first"
                raise ValueError(f"{name} has {len(numbers)} numbers; {expected}")


@dataclass(frozen=True, slots=True)
class AcceptanceFile:
    """A parsed acceptance file. `digest`: sha256 of its bytes."""

    trainer: Trainer
    prompts: tuple[CertifiedPrompt, ...]
    digest: str


def parse_acceptance(content: bytes) -> AcceptanceFile:
    """The acceptance file with this content. Raises AcceptanceError."""
    if len(content) > MOST_BYTES:
        raise AcceptanceError(f"{FILE_NAME} has {len(content)} bytes or more; accepted are at most {MOST_BYTES}")
    lines = content.splitlines()
    if not 2 <= len(lines) <= 1 + MOST_PROMPTS:
        expected = f"expected 2 to {1 + MOST_PROMPTS}: one about the trainer, then one a prompt"
        raise AcceptanceError(f"{FILE_NAME} has {len(lines)} lines; {expected}")
    trainer = _decoded(lines[0], Trainer, 1)
    if trainer.format != FORMAT:
        raise AcceptanceError(f"{FILE_NAME} line 1: format is {trainer.format[:60]!r}; accepted is {FORMAT!r}")
    if len(trainer.libraries) > _MOST_LIBRARIES:
        raise AcceptanceError(f"{FILE_NAME} line 1: {len(trainer.libraries)} libraries; at most {_MOST_LIBRARIES}")
    prompts = tuple(_decoded(line, CertifiedPrompt, at) for at, line in enumerate(lines[1:], 2))
    return AcceptanceFile(trainer, prompts, hashlib.sha256(content).hexdigest())


def acceptance_content(trainer: Trainer, prompts: Sequence[CertifiedPrompt]) -> bytes:
    """The content of an acceptance file. Raises AcceptanceError if it would break a rule of the format."""
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in (trainer, *prompts))
    parse_acceptance(content)
    return content


def read_acceptance(folder: Path) -> AcceptanceFile | None:
    """The acceptance file in a folder; None without one. Blocking. Raises AcceptanceError, OSError."""
    try:
        with (folder / FILE_NAME).open("rb") as file:
            return parse_acceptance(file.read(MOST_BYTES + 1))
    except FileNotFoundError:
        return None


def _decoded(line: bytes, kind: type[T], at: int) -> T:
    """A line of an acceptance file. Raises AcceptanceError."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise AcceptanceError(f"{FILE_NAME} line {at}: {exc}") from exc


# --- the rule ------------------------------------------------------------------------------------------------------

NOISE_FACTOR: Final = 2.5
"""The distance with the adapter may be so many times the noise: docs/acceptance.md has its error rates."""
STRONG_EFFECT, STRONG_FACTOR = 1.5, 4.0
"""An adapter that changes a token by more nats may multiply the noise by so much more: then nothing is proved."""
FLOOR: Final = 1e-4
"""A smaller distance is none: both sides compute in float32 and still add in another order."""
MOST_NOISE: Final = 0.1
"""A larger distance with the base model alone is no noise in any dtype: other weights."""
MOST_NOISE_FLOAT32: Final = 1e-2
"""The same where both sides compute in float32, of which a GPU may drop bits (TF32)."""
MOST_UNSEEN: Final = 0.75
"""Of an adapter's effect: where more could be wrong unseen, nothing is proved."""
SCALE_TOLERANCE: Final = 0.3
"""A scale that is further from 1 is another one, if it is known that well."""
SCALE_ERRORS: Final = 8.0
"""A scale is known within so many of its standard errors."""

_NO_CHANGE, _NO_SCALE = 0.1, 0.25
_SAME_DIRECTION = 0.9
_SOME_DIRECTION = 0.6


def compare_logprobs(
    file: AcceptanceFile, with_adapter: Sequence[Logprobs], without: Sequence[Logprobs], *, engine_dtype: str = ""
) -> AdapterAcceptance:
    """Whether an engine's log-probabilities of a file's prompts are the trainer's.

    with_adapter, without  the engine's, of each prompt's tokens but the first, in the file's order
    engine_dtype           in which the engine computes; "" if that is not known
    """
    trained = _joined([prompt.logprobs for prompt in file.prompts])
    base = _joined([prompt.base_logprobs for prompt in file.prompts])
    served, served_base = _joined(with_adapter), _joined(without)
    if not len(trained) == len(served) == len(served_base) or not all(map(math.isfinite, (*served, *served_base))):
        return unknown(None, "the engine's answer has not one finite log-probability for each token")
    change, expected = _minus(served, base), _minus(trained, base)
    distance, noise, effect = _distance(served, trained), _distance(served_base, base), _mean_size(expected)
    # An adapter multiplies the noise by what it changes: docs/acceptance.md has what real vLLM shows.
    allowed = max(NOISE_FACTOR * noise * (1 + effect**2), FLOOR)
    scale, error = _scale(change, expected), _scale_error(_minus(served_base, base), expected)
    measured = partial(AdapterAcceptance, distance=distance, noise=noise, scale=scale, file=file.digest)
    most_noise = MOST_NOISE_FLOAT32 if {engine_dtype, file.trainer.dtype} == {"float32"} else MOST_NOISE
    if noise > most_noise:
        why = f"the base model itself answers otherwise than at the trainer, by {noise:.3g} a token"
        advice = f"at most {most_noise:g} is noise; expected is the revision of training, quantised as in training"
        return measured(result="differs", looks_like="other_base", why=f"{why}; {advice}")
    tolerance = max(SCALE_TOLERANCE, error)
    is_scaled = scale is not None and abs(scale - 1) > tolerance
    if is_scaled or distance > allowed * (STRONG_FACTOR if effect > STRONG_EFFECT else 1.0):
        likeness = _likeness(change, expected, scale, allowed)
        why = f"{distance:.3g} a token from the trainer, where {allowed:.3g} may be noise; {_LIKENESS_TEXT[likeness]}"
        return measured(result="differs", looks_like=likeness, why=why.format(scale=scale))
    if distance > allowed:
        why = f"the adapter changes these prompts by {effect:.3g} a token, which multiplies the noise of {noise:.3g}"
        return measured(result="unknown", why=f"{why}: {distance:.3g}; certify it in float32, or with other prompts")
    if scale is None or error > SCALE_TOLERANCE or allowed > MOST_UNSEEN * effect:
        why = f"the adapter changes these prompts by {effect:.3g} a token, and {noise:.3g} is noise"
        advice = "which such an adapter multiplies; certify it in float32, or with other prompts"
        advice = advice if effect > STRONG_EFFECT else "certify it with prompts of its training"
        return measured(result="unknown", why=f"{why}; {advice}")
    seen = f"less than {allowed / effect:.2g} of its effect would not be seen"
    return measured(result="equal", why=f"{distance:.3g} a token from the trainer, of {allowed:.3g}; {seen}")


def unknown(file: AcceptanceFile | None, why: str) -> AdapterAcceptance:
    """The result of a comparison that says nothing."""
    return AdapterAcceptance(result="unknown", why=why, file="" if file is None else file.digest)


_LIKENESS_TEXT: Mapping[Likeness, str] = {
    "base": "it looks like the base model without the adapter",
    "scaled": "it looks like the adapter at {scale:.2g} times its scale",
    "part": "it looks like a part of the adapter, or another version of it",
    "other": "it looks like another adapter",
}


def _likeness(change: Logprobs, expected: Logprobs, scale: float | None, allowed: float) -> Likeness:
    """What a change of the base's numbers resembles that is not the expected one."""
    direction = _cosine(change, expected)
    if (
        scale is not None
        and abs(scale) < _NO_SCALE
        and _mean_size(change) <= max(allowed, _NO_CHANGE * _mean_size(expected))
    ):
        return "base"
    if scale is not None and direction >= _SAME_DIRECTION and abs(scale - 1) > SCALE_TOLERANCE:
        return "scaled"
    return "part" if direction >= _SOME_DIRECTION else "other"


def _joined(rows: Sequence[Logprobs]) -> Logprobs:
    """The numbers of all prompts in one row."""
    return [number for row in rows for number in row]


def _minus(one: Logprobs, other: Logprobs) -> Logprobs:
    """The differences of two rows."""
    return [a - b for a, b in zip(one, other, strict=True)]


def _mean_size(row: Logprobs) -> float:
    """The mean of the numbers' magnitudes."""
    return math.fsum(map(abs, row)) / len(row)


def _distance(one: Logprobs, other: Logprobs) -> float:
    """The mean difference of two rows."""
    return _mean_size(_minus(one, other))


def _scale(change: Logprobs, expected: Logprobs) -> float | None:
    """The factor of the expected change that is nearest to a change; None if none is expected."""
    size = sum(each * each for each in expected)
    return None if not size else sum(a * b for a, b in zip(change, expected, strict=True)) / size


def _scale_error(noise: Logprobs, expected: Logprobs) -> float:
    """How far from the right one a scale may be by noise: some of its standard errors."""
    size = math.hypot(*expected)
    least = FLOOR * math.sqrt(len(noise))
    return SCALE_ERRORS * max(math.hypot(*noise), least) / (size * math.sqrt(len(noise))) if size else math.inf


def _cosine(one: Logprobs, other: Logprobs) -> float:
    """The cosine of the angle between two rows; 0 for a row of zeros."""
    sizes = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / sizes if sizes else 0.0


# --- what engines are asked ----------------------------------------------------------------------------------------

LOGPROBS_ROUTE: Final = "/v1/completions"


def vllm_logprobs_body(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The request to vLLM: it computes the prompts, and one token after each."""
    shape = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": list(map(list, prompts)), **shape}


def vllm_prompt_logprobs(prompts: Sequence[Sequence[int]], answer: Any) -> Sequence[Logprobs] | None:
    """The log-probabilities in vLLM's answer; None for an answer without them.

    source  0.32 entrypoints/openai/completion/protocol.py: null for the first token, then {token id: {logprob, rank}}
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        found = []
        for prompt, choice in zip(prompts, choices, strict=True):
            rows = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
            found.append([float(row[str(token)]["logprob"]) for token, row in rows])
    except (KeyError, TypeError, ValueError):
        return None
    return found


def sglang_logprobs_body(adapter: str | None, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The request to SGLang; `adapter` None: the base model."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    options = {"return_logprob": True, "logprob_start_len": 0, "lora_path": [adapter] * len(prompts)}
    return {"input_ids": list(map(list, prompts)), "sampling_params": sampling, **options}


def sglang_prompt_logprobs(prompts: Sequence[Sequence[int]], answer: Any) -> Sequence[Logprobs] | None:
    """The log-probabilities in SGLang's answer; None for an answer without them.

    source  0.5.23 managers/tokenizer_manager.py: [log-probability or null, token id, text] for each token
    """
    try:
        found = []
        for prompt, each in zip(prompts, answer, strict=True):
            rows = each["meta_info"]["input_token_logprobs"][1:]
            if [row[1] for row in rows] != list(prompt[1:]):
                return None
            found.append([float(row[0]) for row in rows])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return found
