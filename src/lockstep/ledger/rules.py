"""What may be written into a ledger, and where one is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.data.samples import Rollouts
from lockstep.ledger import values
from lockstep.ledger.errors import NotARun, PromptUsedTwice
from lockstep.ledger.index import Transaction

INDEX = "ledger.sqlite"


def check_is_run(folder: Path) -> None:
    """Raises NotARun, naming the runs beside it."""
    if (folder / INDEX).is_file():
        return
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    runs = tuple(sorted(path.name for path in beside if (path / INDEX).is_file())[:8])
    raise NotARun(folder, f"it has no {INDEX}" if folder.is_dir() else "there is no such folder", runs)


def add_step(transaction: Transaction, rollouts: Rollouts, digest: str, size: int) -> None:
    """Enters a step and its prompts. Raises PromptUsedTwice."""
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


def last_commit(transaction: Transaction) -> int:
    """The last committed step, -1 when there is none."""
    return int(transaction.execute("SELECT coalesce(max(step), -1) FROM commits")[0][0])


def as_yaml(config: Mapping[str, Any]) -> bytes:
    """A config as people read it."""
    return yaml.safe_dump(values.plain(dict(config), "config"), sort_keys=False, allow_unicode=True).encode()
