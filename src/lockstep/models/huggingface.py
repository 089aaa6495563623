"""Downloads models from the Hugging Face hub with a limit on stalls, and silences transformers."""

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
from lockstep.base.hub import REMEDY, hub_problem
from lockstep.base.text import first_line
from lockstep.models.errors import HubUnreachable, ModelError

DOWNLOAD_STALL_S = 120.0
"""A download fails if it receives no byte for this long."""

_CONFIG_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


def download_model(name: str, revision: str | None, *, field: str, weights: bool) -> Path:
    """Returns the local folder of a hub repository. Downloads it if it is not in the cache.

    Raises:
        ModelError: the repository does not exist, or the hub cannot be reached.
        Stalled: the download received no byte for too long (`lockstep.base.wait_state.Stalled`).
    """
    outcome: list[Path | Exception] = []
    offline = hub_problem()  # then the copy in the cache is used, if there is one

    def work() -> None:
        try:
            patterns = [*_CONFIG_PATTERNS, "*.safetensors"] if weights else _CONFIG_PATTERNS
            folder = snapshot_download(
                name, revision=revision, allow_patterns=patterns, etag_timeout=10, local_files_only=bool(offline)
            )
            outcome.append(Path(folder))
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
    if offline and isinstance(found, LocalEntryNotFoundError):
        problem = f"there is no such folder, it is not in this machine's cache, and {offline}"
        raise HubUnreachable(field, name, problem, REMEDY) from found
    problem = f"there is no such folder, and the hub does not provide it ({type(found).__name__}: {first_line(found)})"
    unreachable = isinstance(found, LocalEntryNotFoundError | ConnectionError)  # the hub itself did not answer
    error_class = HubUnreachable if unreachable else ModelError
    raise error_class(field, name, problem, "give an existing folder or a hub name `owner/name`") from found


def _bytes_in(cache: Path) -> int:
    """Returns how many bytes of the repository are on disk."""
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
    """Disables transformers' progress bars, which do not suit logs, and its warnings, which concern code that the user
    did not write. `TRANSFORMERS_VERBOSITY` in the environment enables the warnings again. Also a decorator.

    Do not use it for downloads, whose bars show progress.
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
