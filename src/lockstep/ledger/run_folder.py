"""The folder of a run: recognizes it, adds steps to its index, and repairs it after the process was killed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.data.samples import Rollouts
from lockstep.ledger import json_values
from lockstep.ledger.durable_files import fsync_folder, replace_file, sha256_file
from lockstep.ledger.errors import NotARun, PromptUsedTwice, StepCorrupt
from lockstep.ledger.sqlite_index import IndexTransaction, LedgerIndex

INDEX_FILE, CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "ledger.sqlite", "config.yaml", "summary.json", "lock"
INPUTS_FOLDER = "inputs"
"""Data and functions that a Python program gave a run. They are in the folder of the run before it is created, because
a run is checked before it is created."""
REWINDING = "rewinding"
"""Key in the index while step files are deleted in a rewind. The value is the last step that stays."""


def check_run_folder(folder: Path) -> None:
    """Raises NotARun, which names the runs in the same folder, if this is not the folder of a run."""
    if (folder / INDEX_FILE).is_file():
        return
    siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
    runs = tuple(sorted(path.name for path in siblings if (path / INDEX_FILE).is_file())[:8])
    raise NotARun(folder, f"it has no {INDEX_FILE}" if folder.is_dir() else "there is no such folder", runs)


def holds_only_inputs(folder: Path) -> bool:
    """Whether this is the folder of a run that is not created yet."""
    return not folder.is_symlink() and folder.is_dir() and [each.name for each in folder.iterdir()] == [INPUTS_FOLDER]


def add_step(transaction: IndexTransaction, rollouts: Rollouts, digest: str, size: int) -> None:
    """Adds a step and its prompts to the index. Raises PromptUsedTwice."""
    for group in rollouts.groups:
        uid = group.prompt.uid
        earlier = transaction.execute("SELECT step FROM prompts WHERE uid = ?", uid)
        if earlier:
            raise PromptUsedTwice(uid, rollouts.step, earlier[0][0])
        transaction.execute("INSERT INTO prompts VALUES (?, ?)", uid, rollouts.step)
    transaction.put(
        "steps",
        step=rollouts.step,
        version=rollouts.version,
        sha256=digest,
        bytes=size,
        groups=len(rollouts.groups),
        completions=sum(len(group.completions) for group in rollouts.groups),
    )


def last_commit(transaction: IndexTransaction) -> int:
    """Returns the last committed step; -1 if there is none."""
    return int(transaction.execute("SELECT coalesce(max(step), -1) FROM commits")[0][0])


def config_yaml(config: Mapping[str, Any]) -> bytes:
    """Returns a config as readable YAML."""
    return yaml.safe_dump(json_values.plain_json(dict(config), "config"), sort_keys=False, allow_unicode=True).encode()


def recover_folder(folder: Path, index: LedgerIndex) -> None:
    """Makes folder and index consistent after the process was killed: deletes unfinished files, and adds complete step
    files to the index that have no row yet. A step file with its final name is complete."""
    finish_rewind(folder, index)
    known = {step: bool(removed) for step, removed in index.rows("SELECT step, removed FROM steps")}
    for path in sorted((folder / "steps").iterdir()):
        step = int(path.stem) - index.first_step if path.stem.isdigit() else None
        if path.name.startswith(".") and path.suffix == ".tmp":
            path.unlink(missing_ok=True)
        elif step is not None and path.suffix == ".arrow" and step not in known:
            _index_step_file(index, step, path)
        elif step is not None and ((path.suffix == ".arrow" and known[step]) or _is_superseded(index, path, step)):
            path.unlink(missing_ok=True)
    config_file, config = folder / CONFIG_FILE, config_yaml(index.parse(index.meta("config"), dict))
    if not config_file.exists() or config_file.read_bytes() != config:
        replace_file(config_file, config)


def finish_rewind(folder: Path, index: LedgerIndex) -> None:
    """Deletes the files of the steps that a rewind removed from the index, if this is still to be done."""
    pending = index.rows("SELECT value FROM meta WHERE key = ?", REWINDING)
    if not pending:
        return
    last, steps = int(pending[0][0]), folder / "steps"
    known = {row[0] for row in index.rows("SELECT step FROM steps")}
    for path in steps.iterdir():
        step = int(path.stem) - index.first_step if path.stem.isdigit() else last
        if step > last and step not in known:
            path.unlink()
    fsync_folder(steps)
    with index.transaction() as transaction:
        transaction.execute("DELETE FROM meta WHERE key = ?", REWINDING)


def _is_superseded(index: LedgerIndex, path: Path, step: int) -> bool:
    return path.suffix == ".partial" and bool(index.rows("SELECT 1 FROM steps WHERE step = ?", step))


def _index_step_file(index: LedgerIndex, step: int, path: Path) -> None:
    from lockstep.ledger.step_file import read_step_file  # needs pyarrow, which the core does not install

    try:
        stored = read_step_file(path, step, index.first_step)
    except StepCorrupt:
        path.rename(path.with_suffix(".rejected"))
        with index.transaction() as transaction:
            fields = json_values.dumps({"step": step + 1, "path": str(path)}, "step_rejected")
            transaction.put("events", kind="step_rejected", fields=fields)
        return
    with index.transaction() as transaction:
        add_step(transaction, stored.rollouts, sha256_file(path), path.stat().st_size)
