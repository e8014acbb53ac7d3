"""Adapters on a Hugging Face hub (the one of HF_ENDPOINT by default): `hf://org/repo[/folder][@revision]`."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from workers.core.errors import SourceError
from workers.core.references import HubReference, parse_hub_reference, redacted
from workers.sources.base import (
    DISK_ERRORS,
    Limits,
    Transfer,
    TransientSourceError,
    run_in_daemon_thread,
    too_big_error,
    with_retries,
)
from workers.verification.adapter_files import folder_description
from workers.verification.beside import MOST_TEXT_BYTES, read_names
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES

T = TypeVar("T")
_CHUNK_BYTES = 1 << 16
_PROBE_S = 5.0
"""A caller waits for the answer whether a relative path is a repository."""


class HubSource:
    """The source for `hf://`: resolves the revision to a commit, then fetches that commit's files.

    huggingface_hub 2.4 resumes an interrupted download, but not one of an earlier process, and fetches from Xet storage
    in parallel.
    """

    def __init__(self, limits: Limits, *, token_file: Path | None = None, endpoint: str | None = None) -> None:
        """`token_file` is read for each fetch; without it huggingface_hub finds the token (HF_TOKEN)."""
        self._limits = limits
        self._token_file = token_file
        self._endpoint = endpoint

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Resolve the revision to a commit, which is pinned, and download its files. Raises SourceError.

        See `Source.fetch`.
        """
        reference = parse_hub_reference(ref)
        api = await asyncio.to_thread(self._hub_client, ref, transfer.credential)

        async def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
            """Call the library with retries."""
            return await with_retries(lambda: _call_hub(ref, transfer, function, *args, **kwargs), ref, self._limits)

        info = await call(
            api.model_info,
            reference.repo,
            revision=reference.revision,
            files_metadata=True,
            timeout=self._limits.timeout_s,
        )
        names = self._adapter_files(ref, reference, info, transfer)
        transfer.pinned = reference.at_commit(info.sha)
        for name in _read_paths(reference, info):
            head = await call(_read_head, api, reference.repo, name, info.sha, self._limits.timeout_s)
            transfer.texts[name.rpartition("/")[2]] = head
        scratch = into / ".hub"
        bar = _progress_bar_class(transfer)
        for name in names:
            await call(
                api.hf_hub_download, reference.repo, name, revision=info.sha, local_dir=scratch, tqdm_class=bar,
                etag_timeout=self._limits.timeout_s,
            )  # fmt: skip
        await asyncio.to_thread(_move_files, scratch, names, into)

    async def repository_problem(self, ref: str) -> str:
        """Why a repository cannot be read, asked once and for seconds; "" if it can. Raises nothing."""
        try:
            reference = parse_hub_reference(ref)
            api = await asyncio.to_thread(self._hub_client, ref, "")
            async with asyncio.timeout(_PROBE_S):
                await _call_hub(ref, Transfer(), api.model_info, reference.repo, timeout=_PROBE_S)
        except SourceError as exc:
            return str(exc)
        except (TransientSourceError, TimeoutError, OSError) as exc:
            return f"it cannot be reached from this worker ({exc or type(exc).__name__})"
        return ""

    def _hub_client(self, ref: str, credential: str) -> Any:
        """Create the library's client with the credential, else the worker's token. Raises SourceError.

        Silences the library's log. Without `hf_token_file` the library finds a token or uses none.
        """
        try:
            from huggingface_hub import HfApi, constants  # noqa: PLC0415  (heavy, and used by few)
            from huggingface_hub.utils import logging  # noqa: PLC0415
        except ImportError as exc:
            message = f"source {redacted(ref)}: hf:// needs huggingface_hub; pip install huggingface_hub"
            raise SourceError("source_extra_missing", message) from exc
        # CRITICAL only: its warnings contain signed URLs of redirects.
        logging.set_verbosity(50)
        if constants.is_offline_mode():
            message = f"source {redacted(ref)}: HF_HUB_OFFLINE is set for this agent, so hf:// is not called"
            raise SourceError("source_unsupported", message)
        return HfApi(endpoint=self._endpoint, token=credential or self._worker_token(ref), library_name="lorafleet")

    def _worker_token(self, ref: str) -> str | None:
        """Read the worker's token from `hf_token_file`; None without that setting. Raises SourceError."""
        if self._token_file is None:
            return None
        try:
            return self._token_file.read_text().strip()
        except (OSError, UnicodeError) as exc:
            message = f"source {redacted(ref)}: hf_token_file {str(self._token_file)!r} cannot be read"
            raise SourceError("source_unauthorized", message) from exc

    def _adapter_files(self, ref: str, reference: HubReference, info: Any, transfer: Transfer) -> list[str]:
        """Paths of the adapter's files in the repository; sets the expected total in `transfer`.

        raises  SourceError if there are none, or too many bytes
        """
        prefix = _folder_prefix(reference)
        below = _sizes_below(prefix, info)
        folder_files = {name: size for name, size in below.items() if "/" not in name}
        folders = sorted({name.partition("/")[0] for name in below if "/" in name})
        adapter_files = transfer.choose_files(folder_files, allow_pickle=self._limits.allow_pickle, folders=folders)
        sizes = {prefix + name: size for name, size in folder_files.items() if name in adapter_files}
        if prefix + CONFIG_NAME not in sizes:
            message = f"source {redacted(ref)}: no {prefix}{CONFIG_NAME} at commit {info.sha}"
            message += f", {folder_description(folder_files, folders)}"
            raise SourceError("source_not_found", message)
        if (size := sizes[prefix + CONFIG_NAME]) > MAX_CONFIG_BYTES:
            message = f"source {redacted(ref)}: {CONFIG_NAME} has {size} bytes, at most {MAX_CONFIG_BYTES} are allowed"
            raise SourceError("source_too_big", message)
        if (total := sum(sizes.values())) > self._limits.max_bytes:
            raise too_big_error(ref, total, self._limits)
        transfer.expect(total)
        return sorted(sizes)


def _folder_prefix(reference: HubReference) -> str:
    """The beginning of all paths of the adapter's files in the repository."""
    return f"{reference.folder}/" if reference.folder else ""


def _sizes_below(prefix: str, info: Any) -> dict[str, int]:
    """Path below a folder of the repository -> size of the file."""
    files = [file for file in info.siblings or () if file.rfilename.startswith(prefix)]
    return {file.rfilename[len(prefix) :]: file.size or 0 for file in files}


def _read_paths(reference: HubReference, info: Any) -> list[str]:
    """The paths of texts beside the adapter that are compared with the base model's, or carried."""
    prefix = _folder_prefix(reference)
    return [prefix + name for name in read_names(_sizes_below(prefix, info))]


def _read_head(api: Any, repo: str, name: str, commit: str, timeout_s: float) -> bytes:
    """The beginning of a file of the repository. Blocking; raises the library's errors."""
    from huggingface_hub import get_session, hf_hub_url  # noqa: PLC0415  (heavy, and used by few)
    from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415
    from huggingface_hub.utils._http import hf_raise_for_status  # noqa: PLC0415

    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    headers = build_hf_headers(token=api.token, library_name=api.library_name)
    headers |= {"range": f"bytes=0-{MOST_TEXT_BYTES - 1}", "accept-encoding": "identity"}
    head = b""
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout_s) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""  # an empty file
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes(_CHUNK_BYTES):
            head += chunk
            if len(head) >= MOST_TEXT_BYTES:
                break
    return head[:MOST_TEXT_BYTES]


async def _call_hub(ref: str, transfer: Transfer, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call the library in a thread; raises SourceError or TransientSourceError with class and status of its error.

    The library's messages contain addresses. A cancellation also cancels `transfer`; errors of the disk are raised as
    they are.
    """
    done_before = transfer.progress.done_bytes
    try:
        return await run_in_daemon_thread(function, *args, **kwargs)
    except asyncio.CancelledError:
        transfer.cancel()
        raise
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in DISK_ERRORS:
            raise
        raise _translated_error(ref, exc, has_moved=transfer.progress.done_bytes > done_before) from None


def _translated_error(ref: str, exc: Exception, *, has_moved: bool) -> SourceError | TransientSourceError:
    """A library's exception as SourceError, or TransientSourceError if another attempt may succeed."""
    name = type(exc).__name__
    status = getattr(getattr(exc, "response", None), "status_code", 0)
    if not status:
        return TransientSourceError(name, has_moved=has_moved)
    subject = f"source {redacted(ref)}: {name} (HTTP {status})"
    if name in {"RevisionNotFoundError", "RemoteEntryNotFoundError", "EntryNotFoundError"}:
        return SourceError("source_not_found", f"{subject}: the repository has no such revision or file")
    if name == "GatedRepoError" or status in {401, 403}:
        # The hub also answers 401 if the repository does not exist.
        message = f"{subject}: no such repository, or one that this worker's token may not read; see HF_TOKEN"
        return SourceError("source_unauthorized", message)
    if status in {404, 410}:
        return SourceError("source_not_found", f"{subject}: no such repository")
    if status in {400, 416, 422}:
        return SourceError("source_invalid", f"{subject}: the hub refuses this reference")
    return TransientSourceError(f"{name} (HTTP {status})", has_moved=has_moved)


def _progress_bar_class(transfer: Transfer) -> type:
    """A tqdm-like class for huggingface_hub that counts bytes in `transfer` and draws nothing."""

    class Bar:
        """One file's progress bar, which only counts bytes."""

        def __init__(self, *_: object, **__: object) -> None:
            self.n = 0

        def update(self, size_bytes: float | None = 1) -> None:
            """Add received bytes to `transfer`. Raises TransferCancelled."""
            transfer.advance(int(size_bytes or 0))

        def close(self) -> None:
            """No-op: nothing was drawn."""

        def refresh(self) -> None:
            """No-op: nothing is drawn."""

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            """Close the bar."""
            self.close()

    return Bar


def _move_files(scratch: Path, names: list[str], into: Path) -> None:
    """Move the downloaded files up and delete the scratch folder. Raises SourceError for special files."""
    for name in names:
        file = scratch / name
        if file.is_symlink() or not file.is_file():
            raise SourceError("source_unsafe", f"{Path(name).name}: not a regular file")
        file.rename(into / file.name)
    shutil.rmtree(scratch)
