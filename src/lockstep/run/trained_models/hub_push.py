"""Uploads the model of a run, or an exported folder, to the Hugging Face hub."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]

from lockstep.base.folders import scratch_dir
from lockstep.base.hub import REMEDY, hub_problem
from lockstep.base.text import count_noun, first_line
from lockstep.ledger.ledger import Ledger
from lockstep.report.model_card import CARD_FILE, model_card
from lockstep.run.errors import RunRefused
from lockstep.run.planning.working_folder import in_working_folder
from lockstep.run.trained_models.model_target import SCRATCH_PREFIX, ModelTarget, find_target

_WEIGHTS = ("*.safetensors", "*.bin")


class PushFailed(RuntimeError):
    """The hub refused an upload, or it broke off."""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """Where to upload to."""

    name: str
    """`owner/name`, or a name in the account of the token."""
    private: bool = False
    """Whether only the owner may see it; an existing public repository is refused then."""
    revision: str | None = None
    """The branch, created if it does not exist; the main one when absent."""


@dataclass(frozen=True, slots=True)
class PushedModel:
    """What was uploaded, or would be."""

    url: str
    """Of the commit; "" if nothing was uploaded."""
    files: dict[str, int]
    """The size of each file in bytes, by its path in the repository."""
    card: str
    """The model card; "" if there is none."""


def push_model(
    source: str,
    repository: HubRepository,
    step: str | None = None,
    adapter: bool = False,
    dry_run: bool = False,
    status: Callable[[str], None] = lambda text: None,
) -> PushedModel:
    """Uploads a model in one commit. Of a run, it exports a checkpoint and writes a model card; a folder is uploaded
    as it is.

    Args:
        source: a run, one of its checkpoints, or an exported model or adapter.
        step: the checkpoint of a run: `last`, `best` or a number of steps; the last when absent.
        adapter: of a run, the adapter alone.
        dry_run: ask the hub nothing and upload nothing.

    Raises:
        RunRefused, LedgerError, ConfigError, ModelError, CheckpointError: there is no such model, or the hub cannot be
            used: unreachable, no token, no right to write, a public repository for a private model.
        PushFailed: the upload failed; nothing of it is visible on the hub.
    """
    target = find_target(source, step)
    if target.step is None and not _is_model(Path(target.path)):
        raise RunRefused(f"{source} is neither a run nor a folder with a model: there is nothing to upload")
    if adapter and target.step is None:
        raise RunRefused(f"--adapter takes the folder of a run, which {source} is not")
    _check_name(repository.name)
    if target.step is None:
        from lockstep.models.folder_digests import check_digests  # imports torch

        check_digests(Path(target.path), "MODEL")
    api, name = (None, repository.name) if dry_run else _open_repository(repository)
    with _folder_to_push(target, adapter, name, status) as (folder, message):
        files = _files(folder)
        pushed = PushedModel("", files, _read_card(folder))
        if api is None:
            return pushed
        if not sys.stderr.isatty():
            disable_progress_bars()
        status(f"uploading {count_noun(len(files), 'file')} ({sum(files.values()) / 1e6:,.1f} MB) to {name}")
        try:
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message=message,
                revision=repository.revision,
                allow_patterns=list(files),
            )
        except (HfHubHTTPError, HTTPError, OSError, RuntimeError, ValueError) as error:
            raise PushFailed(f"{name}: {_reason(error)}; push again, uploaded files are not sent twice") from error
        return PushedModel(str(commit.commit_url), files, pushed.card)


@contextmanager
def _folder_to_push(
    target: ModelTarget, adapter: bool, name: str, status: Callable[[str], None]
) -> Iterator[tuple[Path, str]]:
    """The folder to upload, and the commit's message."""
    if target.step is None or target.run is None:
        yield Path(target.path), "Upload a model with Lockstep"
        return
    from lockstep.run.trained_models.checkpoint_export import export_checkpoint  # imports torch

    with scratch_dir(SCRATCH_PREFIX) as scratch:
        folder = scratch / "model"
        status(f"exporting {target.name}")
        with in_working_folder(target.run) as run:
            steps = export_checkpoint(run, folder, target.step, adapter=adapter)
            with Ledger.reader(run) as ledger:
                card = model_card(ledger, folder, steps, name)
        (folder / CARD_FILE).write_text(card, encoding="utf-8")
        yield folder, f"Upload the model after {count_noun(steps, 'step')} with Lockstep"


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RunRefused(f"{name} is no name of a repository: give OWNER/NAME ({first_line(error)})") from error


def _open_repository(repository: HubRepository) -> tuple[HfApi, str]:
    """Creates the repository and branch unless they exist. Returns the repository's full name too."""
    if constants.HF_HUB_OFFLINE:
        raise RunRefused("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it")
    if problem := hub_problem():
        raise RunRefused(f"{problem}: {REMEDY}")
    if get_token() is None:
        raise RunRefused("there is no token for the hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi(library_name="lockstep-rl")
    try:
        name = api.create_repo(repository.name, private=repository.private or None, exist_ok=True).repo_id
        if repository.private and not api.model_info(name).private:
            raise RunRefused(f"{name} exists and is public: choose another name, or make it private in its settings")
        if repository.revision is not None:
            api.create_branch(name, branch=repository.revision, exist_ok=True)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise RunRefused(f"{repository.name}: {_reason(error)}") from error
    return api, str(name)


def _reason(error: Exception) -> str:
    """Why the hub refused a request, with what to do where that is known."""
    while not isinstance(error, HfHubHTTPError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the library's own says only which file it was
    code = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if code == 401:
        return "the hub does not accept the token: run `hf auth login`, or set HF_TOKEN to a valid one"
    if code == 403:
        return "the token may not write there: use one with write access, or a name in your own account"
    return first_line(error) or type(error).__name__


def _is_model(folder: Path) -> bool:
    described = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return described and any(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _files(folder: Path) -> dict[str, int]:
    """The files to upload, without hidden ones."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    relative = {path: path.relative_to(folder) for path in paths}
    hidden = {path for path, name in relative.items() if any(part.startswith(".") for part in name.parts)}
    return {relative[path].as_posix(): path.stat().st_size for path in paths if path not in hidden}


def _read_card(folder: Path) -> str:
    path = folder / CARD_FILE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
