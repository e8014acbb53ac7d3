"""Makes a family's base model and its adapters at toy size, with transformers and PEFT, in float32.

What PEFT computes for one prompt is kept beside each adapter: the log-probabilities of the next token.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.adapters.families import VOCABULARY, ModelFamily

PROMPT = tuple(range(10, 34))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REFERENCE = "reference.json"
_ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "out_proj",
    "in_proj",
    "q_b_proj",
    "kv_b_proj",
    "query",
    "value",
)
_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|audio|image|embed_vision|multi_modal|connector|aligner)\w*(?:\.|$)")


@dataclass(slots=True)
class Workshop:
    """A family's base model, from which adapters are made."""

    family: ModelFamily
    model: torch.nn.Module
    base_name: str

    @classmethod
    def open(cls, family: ModelFamily, into: Path) -> "Workshop":
        """Make the base model and save it into a folder, with what it computes for the prompt."""
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(family.model_type or family.name, **family.kwargs)
        model = getattr(transformers, family.auto).from_config(config, dtype=torch.float32, attn_implementation="eager")
        model.eval()
        model.save_pretrained(into)
        _store_as_published(into / "model.safetensors", family)
        (into / REFERENCE).write_text(json.dumps(next_logprobs(model)))
        if family.kind == "pooling":
            words = tokenizers.Tokenizer(
                tokenizers.models.WordLevel({f"w{id_}": id_ for id_ in range(VOCABULARY)}, "w3")
            )
            transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(into)
        return cls(family, model, f"acme/{family.name}-toy")

    @property
    def task(self) -> str:
        """PEFT's name for what the model does."""
        if self.family.kind != "pooling":
            return "CAUSAL_LM"
        return "SEQ_CLS" if "Classification" in self.family.auto else "FEATURE_EXTRACTION"

    def linear(self) -> list[str]:
        """The names of the model's linear layers, without its head."""
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "score", "classifier"))
        ]

    def language(self) -> list[str]:
        """The linear layers of the language model: those of no tower and no connector."""
        return [name for name in self.linear() if not _TOWER.search(name)]

    def attention(self) -> list[str]:
        """The last parts of the names of its attention layers, as people write them into `target_modules`."""
        found = {name.rpartition(".")[2] for name in self.language()}
        chosen = [name for name in _ATTENTION if name in found]
        if "o_proj" in chosen:  # then `in_proj` and `out_proj` are of Mamba's layers, which PEFT refuses
            chosen = [name for name in chosen if name not in ("in_proj", "out_proj")]
        return chosen or sorted(found)

    def expert_parameters(self) -> list[str]:
        """The parameters of fused experts, such as `mlp.experts.gate_up_proj`."""
        return sorted(
            {
                ".".join(name.rsplit(".", 3)[1:])
                for name, parameter in self.model.named_parameters()
                if ".experts." in name and parameter.dim() == 3 and name.endswith("_proj")
            }
        )

    def adapter(self, into: Path, *, rank: int = 8, alpha: float = 32, **lora: Any) -> Path:
        """Make an adapter with PEFT and save it; its weights are drawn, so that it changes every answer."""
        torch.manual_seed(sum(map(ord, into.name)))
        lora = {"init_lora_weights": False, "task_type": self.task, **lora}
        model = get_peft_model(copy.deepcopy(self.model), LoraConfig(r=rank, lora_alpha=alpha, **lora)).eval()
        model.peft_config["default"].base_model_name_or_path = self.base_name
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1.5)
        model.save_pretrained(into)
        (into / "README.md").unlink(missing_ok=True)
        (into / REFERENCE).write_text(json.dumps(next_logprobs(model)))
        return into


def _store_as_published(path: Path, family: ModelFamily) -> None:
    """Store a base model as published ones are, which vLLM 0.32 reads alone; transformers 5 saves some otherwise.

    Towers of SigLIP and CLIP have a longer name, and the experts of Qwen3-VL-MoE are the other way round.
    """
    tensors = load_file(path)
    if family.name == "qwen3_vl_moe":
        experts = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
        save_file({**tensors, **experts}, path, {"format": "pt"})
    short = re.compile(r"vision_tower\.(?=embeddings|encoder|post_layernorm|pre_layrnorm)")
    if any("vision_tower.encoder.layers." in name for name in tensors):
        renamed = {short.sub("vision_tower.vision_model.", name): tensor for name, tensor in tensors.items()}
        save_file(renamed, path, {"format": "pt"})


def next_logprobs(model: torch.nn.Module) -> list[float] | None:
    """The log-probabilities of all tokens after the prompt; None of a model that fails.

    Of a classifier the probabilities of its classes, of an embedding model the last token's vector.
    """
    try:
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([PROMPT]))
    except AttributeError:  # PEFT 0.21 wraps routers of experts that return more than a tensor
        return None
    if getattr(output, "logits", None) is None:
        vector = output.last_hidden_state[0, -1].float()
        return [round(value, 6) for value in (vector / vector.norm()).tolist()]
    if output.logits.dim() == 2:
        return [round(value, 6) for value in output.logits[0].float().softmax(-1).tolist()]
    return [round(value, 6) for value in output.logits[0, -1, :VOCABULARY].float().log_softmax(-1).tolist()]


# --- what other trainers write, from what PEFT has written --------------------------------------------------------


def change_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change keys of an adapter's config; returns its folder."""
    path = folder / CONFIG
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}, indent=2))
    return folder


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> Path:
    """Rename an adapter's tensors; returns its folder."""
    path = folder / WEIGHTS
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


def change_tensors(folder: Path, change: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Path:
    """Replace an adapter's tensors by what the function makes of them; returns its folder."""
    path = folder / WEIGHTS
    save_file({name: each.contiguous() for name, each in change(load_file(path)).items()}, path, {"format": "pt"})
    return folder


warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
