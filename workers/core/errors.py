"""The agent's error tree.

WorkerError
├── AgentRequestError  the request is wrong: unknown adapter, invalid name, missing or old epoch
├── SourceError        the adapter's files are missing, forbidden, too big, or invalid
│   └── WrongBytes         other workers of the fleet sent other bytes than the digest's: they are asked no more
├── EngineError        the engine has no free slot, refused the adapter, is unreachable, down or draining
└── WorkerBusy         as much is under way as this worker allows: a retry, here or elsewhere, helps

Each error has the `status` and `code` of the HTTP answer, and `retry_after_s` if a retry can help.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar


def sendable(text: str) -> str:
    """The text as JSON can hold it: a byte of a file's name that is no UTF-8 becomes `\\udc` and the byte."""
    return text.encode(errors="backslashreplace").decode()


class WorkerError(Exception):
    """An error with a code; `codes` maps the class's codes to HTTP statuses. Its message is `sendable`."""

    codes: ClassVar[Mapping[str, int]] = {}

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(sendable(message))
        self.code = code
        self.status = self.codes[code]
        self.param = param
        self.retry_after_s = retry_after_s


class AgentRequestError(WorkerError):
    """The request is wrong: a retry needs another request."""

    codes: ClassVar[Mapping[str, int]] = {
        "invalid_lora_id": 400,
        "invalid_epoch": 400,
        "acceptance_invalid": 400,
        "adapter_unknown": 404,
        "address_not_mine": 409,
        "cancelled": 409,
        "stale_epoch": 409,
        "epoch_required": 409,
        "model_files_unavailable": 404,
        "worker_key_missing": 409,
        "files_not_found": 404,
        "upload_unknown": 404,
        "upload_file_unknown": 400,
        "upload_offset": 409,
        "upload_incomplete": 409,
        "upload_superseded": 409,
        "events_gone": 410,
    }


class SourceError(WorkerError):
    """The adapter or its source is at fault: a retry with the same files fails again."""

    codes: ClassVar[Mapping[str, int]] = {
        "source_unsupported": 400,
        "source_invalid": 400,
        "source_relative": 400,
        "source_is_repository": 400,
        "source_not_found": 404,
        "source_forbidden": 403,
        "source_too_big": 413,
        "source_failed": 502,
        "source_unauthorized": 502,
        "source_address_forbidden": 403,
        "source_extra_missing": 501,
        "source_unsafe": 422,
        "adapter_invalid": 422,
        "adapter_incomplete": 422,
        "adapter_pickled": 422,
        "adapter_file_unsupported": 422,
        "adapter_config_invalid": 422,
        "peft_type_unsupported": 422,
        "peft_feature_unsupported": 422,
        "dora_unsupported": 422,
        "bias_unsupported": 422,
        "modules_to_save_unsupported": 422,
        "weights_corrupt": 422,
        "weights_empty": 422,
        "weights_not_finite": 422,
        "tensor_unexpected": 422,
        "tensor_unpaired": 422,
        "dtype_unsupported": 422,
        "shape_mismatch": 422,
        "rank_mismatch": 422,
        "module_untargeted": 422,
        "module_unknown": 422,
        "module_unsupported": 422,
        "modules_unmatched": 422,
        "rank_too_big": 422,
        "base_model_mismatch": 422,
        "digest_mismatch": 409,
        "disk_full": 507,
    }


class WrongBytes(SourceError):
    """Other workers sent other bytes than those of the digest. `served_by`: URLs of the agents that sent some."""

    def __init__(self, message: str, served_by: Iterable[str]) -> None:
        super().__init__("digest_mismatch", message)
        self.served_by = frozenset(served_by)


class WorkerBusy(WorkerError):
    """As much is under way as this worker allows."""

    codes: ClassVar[Mapping[str, int]] = {"files_busy": 503}


class EngineError(WorkerError):
    """The engine cannot serve the request now, or refused the adapter."""

    codes: ClassVar[Mapping[str, int]] = {
        "no_free_slot": 409,
        "adapter_refused": 422,
        "adapter_no_effect": 422,
        "modules_ignored": 422,
        "not_accepted": 422,
        "adapters_refused": 409,
        "acceptance_unknown": 503,
        "engine_failed": 503,
        "engine_unreachable": 503,
        "engine_timeout": 504,
        "engine_down": 503,
        "engine_start_failed": 503,
        "draining": 503,
        "not_ready": 503,
    }
