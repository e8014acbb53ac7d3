"""Acceptance files from a trainer's own numbers, or from a PEFT model: see docs/acceptance.md.

torch is imported by `certify_peft` alone, whose caller has it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from lorafleet.client.results import FleetError
from lorafleet.engine.acceptance import (
    FILE_NAME,
    LEAST_TOKENS,
    MOST_PROMPTS,
    MOST_TOKENS,
    AcceptanceError,
    CertifiedPrompt,
    Trainer,
    acceptance_content,
)
from lorafleet.identity import FileEntry, files_digest
from lorafleet.service.files import write_atomically

Prompts: TypeAlias = Sequence[Sequence[int]]
LogprobsOf: TypeAlias = Callable[[list[int]], Sequence[float]]
"""The log-probability of each token of a prompt but the first."""

_LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def write_acceptance(
    folder: str | PathLike[str],
    prompts: Prompts,
    logprobs: LogprobsOf | Sequence[Sequence[float]],
    base_logprobs: LogprobsOf | Sequence[Sequence[float]],
    *,
    model: str = "",
    dtype: str = "",
    libraries: Mapping[str, str] | None = None,
    chat_template: str = "",
) -> Path:
    """Write `acceptance.jsonl` into an adapter's folder; returns its path.

    prompts        token ids; the first three count, and of each the first 256 tokens
    logprobs       with the adapter: a function of a prompt, or a list for each prompt
    base_logprobs  the same without the adapter
    dtype          of the computation, such as bfloat16
    libraries      name -> version; default: those of PyTorch's world that are installed here
    chat_template  the template in training, if the prompts are chats; only its sha256 is written
    raises         FleetError if a number or a prompt breaks a rule of the format
    """
    chosen = [list(map(int, prompt[:MOST_TOKENS])) for prompt in prompts[:MOST_PROMPTS]]
    target = Path(folder)
    trainer = Trainer(
        model=model[:200],
        dtype=dtype.removeprefix("torch."),
        libraries=dict(_installed_versions() if libraries is None else libraries),
        adapter=_adapter_digest(target),
        chat_template=hashlib.sha256(chat_template.strip().encode()).hexdigest() if chat_template else "",
    )
    with_adapter, without = _numbers(logprobs, chosen), _numbers(base_logprobs, chosen)
    try:
        lines = [
            CertifiedPrompt(prompt=tuple(prompt), logprobs=tuple(with_adapter[at]), base_logprobs=tuple(without[at]))
            for at, prompt in enumerate(chosen)
        ]
        content = acceptance_content(trainer, lines)
    except (AcceptanceError, ValueError) as exc:
        raise FleetError(f"{target}: no {FILE_NAME}: {exc}") from exc
    path = target / FILE_NAME
    write_atomically(path, content, mode=0o644)
    return path


def certify_peft(
    model: Any,
    folder: str | PathLike[str],
    prompts: Prompts | None = None,
    *,
    adapter: str | None = None,
    chat_template: str = "",
) -> Path:
    """Write `acceptance.jsonl` for an adapter of a PEFT model that is saved in the folder; returns its path.

    model    a PeftModel, as trained or as loaded; left as it was
    prompts  token ids, best of the training data; default: texts that the adapter writes itself
    adapter  its name in the model; default: the active one
    raises   FleetError
    """
    import torch  # noqa: PLC0415  (heavy, and the caller has it)

    def logprobs(prompt: list[int]) -> list[float]:
        """The log-probability of each token but the first."""
        ids = torch.tensor([prompt], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return [float(each) for each in logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]]

    def base_logprobs(prompt: list[int]) -> list[float]:
        """The same without the adapter."""
        with model.disable_adapter():
            return logprobs(prompt)

    with _evaluating(model, adapter), torch.inference_mode():
        chosen = _written_prompts(model) if prompts is None else prompts
        return write_acceptance(
            folder,
            chosen,
            logprobs,
            base_logprobs,
            model=str(model.config._name_or_path),
            dtype=str(model.dtype),
            chat_template=chat_template,
        )


def certify_folder(
    folder: str | PathLike[str],
    base: str,
    prompts: Prompts | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
) -> Path:
    """Write `acceptance.jsonl` for a saved adapter, by transformers and PEFT; returns its path.

    base    folder or name of the base model
    dtype   of the computation; auto: the base model's
    raises  FleetError, also without transformers and PEFT
    """
    try:
        from peft import PeftModel  # noqa: PLC0415  (heavy, and of an extra)
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
    except ImportError as exc:
        raise FleetError(f"certifying needs transformers and PEFT ({exc}): pip install 'lorafleet[reference]'") from exc
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        adapted = PeftModel.from_pretrained(model.to(device), str(folder)).eval()
    except (OSError, ValueError, RuntimeError) as exc:
        raise FleetError(f"{folder} on {base}: {exc}; expected an adapter's folder and its base model") from exc
    return certify_peft(adapted, folder, prompts, chat_template=_chat_template(str(folder)))


def _chat_template(folder: str) -> str:
    """The chat template that training has saved beside the adapter; "" without one."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        template = AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template
    except (OSError, ValueError, KeyError, AttributeError):
        return ""
    return template if isinstance(template, str) else ""


@contextmanager
def _evaluating(model: Any, adapter: str | None) -> Iterator[None]:
    """The model without dropout, and with this adapter active; as before afterwards."""
    was_training, before = model.training, model.active_adapter
    model.eval()
    if adapter is not None:
        model.set_adapter(adapter)
    try:
        yield
    finally:
        if adapter is not None:
            model.set_adapter(before)
        model.train(was_training)


def _written_prompts(model: Any, tokens: int = 96) -> list[list[int]]:
    """Texts that the model writes from different first tokens, the same each time."""
    import torch  # noqa: PLC0415

    vocabulary = model.config.get_text_config().vocab_size
    first = model.config.get_text_config().bos_token_id
    texts = []
    for seed in range(MOST_PROMPTS):
        draw = torch.Generator().manual_seed(seed)
        begin = torch.randint(vocabulary, (LEAST_TOKENS,), generator=draw).tolist()
        text = [*([first] if isinstance(first, int) else []), *begin]
        state = None
        while len(text) < tokens:
            ids = torch.tensor([text if state is None else text[-1:]], device=model.device)
            answer = model(input_ids=ids, past_key_values=state, use_cache=True)
            state = answer.past_key_values
            chances = answer.logits[0, -1].float().softmax(-1).cpu()
            text.append(int(torch.multinomial(chances, 1, generator=draw)))
        texts.append(text)
    return texts


def _numbers(given: LogprobsOf | Sequence[Sequence[float]], prompts: Sequence[list[int]]) -> list[list[float]]:
    """The numbers of each prompt, rounded to what a float32 holds of them."""
    rows = [given(prompt) for prompt in prompts] if callable(given) else given
    if len(rows) < len(prompts):
        raise FleetError(f"log-probabilities of {len(rows)} prompts; expected {len(prompts)}, a list for each")
    return [
        [round(float(number), 6) for number in row[: len(prompt) - 1]]
        for row, prompt in zip(rows, prompts, strict=False)
    ]


def _adapter_digest(folder: Path) -> str:
    """The digest of the adapter's files in a folder; "" without them."""
    entries = []
    for name in _ADAPTER_FILES:
        try:
            with (folder / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                entries.append(FileEntry(name, file.tell(), sha256))
        except OSError:
            return ""
    return files_digest(entries)


def _installed_versions() -> dict[str, str]:
    """The versions of libraries of trainers that are installed here."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
