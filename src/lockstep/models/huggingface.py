"""Hugging Face libraries: downloads from the hub that end by success, error or stall, and transformers without
progress bars and advice.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from transformers.utils import logging

from lockstep.base import waits
from lockstep.base.text import first_line
from lockstep.models.errors import HubUnreachable, ModelError

DOWNLOAD_STALL_S = 120.0
"""A download that brings no byte for this long has failed."""

_CONFIG_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


def download_model(name: str, revision: str | None, *, field: str, weights: bool) -> Path:
    """The local folder of a hub repository, downloaded if it is not in the cache.

    Raises:
        ModelError: no such repository, or the hub cannot be reached.
        Stalled: the download stopped moving (`lockstep.base.wait_state.Stalled`).
    """
    outcome: list[Path | Exception] = []

    def work() -> None:
        try:
            patterns = [*_CONFIG_PATTERNS, "*.safetensors"] if weights else _CONFIG_PATTERNS
            outcome.append(Path(snapshot_download(name, revision=revision, allow_patterns=patterns, etag_timeout=10)))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name=f"download {name}", daemon=True)
    thread.start()
    cache = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")

    def finished() -> bool | None:
        return None if thread.is_alive() else True

    waits.poll(
        finished,
        kind="download",
        waits_for="huggingface.co",
        why=f"downloading {name}",
        every_s=0.05,
        stall_s=DOWNLOAD_STALL_S,
        progress=lambda: _bytes_in(cache),
    )
    if not outcome:
        raise ModelError(field, name, "its download ended without a result", "see the traceback above")
    if isinstance(found := outcome[0], Path):
        return found
    problem = f"there is no such folder, and the hub does not give it ({type(found).__name__}: {first_line(found)})"
    silent = isinstance(found, LocalEntryNotFoundError | ConnectionError)  # as opposed to a refusal by the hub
    refusal = HubUnreachable if silent else ModelError
    raise refusal(field, name, problem, "give an existing folder or a hub name `owner/name`") from found


def _bytes_in(cache: Path) -> int:
    """Bytes of the repository that are on disk by now."""
    blobs = cache / "blobs"
    if not blobs.is_dir():
        return 0
    sizes = 0
    for path in blobs.iterdir():
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # renamed meanwhile, when its download was complete
            continue
    return sizes


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars (a log is no terminal) and without its advice, which is about code that the
    user did not write. `TRANSFORMERS_VERBOSITY` in the environment brings the advice back. Also a decorator.

    Not for downloads: their bars show progress.
    """
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
