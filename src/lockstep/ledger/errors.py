"""Errors of the ledger, with fields for callers and a fix in the message. A field `step` is an index from 0, as in the
ledger's methods; messages count from 1."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.ledger.config_changes import ConfigChange


class LedgerError(RuntimeError):
    """Base class of the errors of the ledger."""


class FolderExists(LedgerError):
    """The folder of a new run exists already. It is unchanged."""

    def __init__(self, folder: Path, is_run: bool) -> None:
        what = "already holds a run" if is_run else "already exists"
        resume = f" resume it (--resume {folder})," if is_run else ""
        super().__init__(f"{folder} {what}:{resume} choose another name (name=...), or move the folder away")
        self.folder, self.is_run = folder, is_run


class NotARun(LedgerError):
    """A folder has no readable ledger."""

    def __init__(self, folder: Path, reason: str, nearest: tuple[str, ...] = ()) -> None:
        hint = f"; runs in the same folder: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"{folder} is not the folder of a run: {reason}{hint}")
        self.folder, self.reason, self.nearest = folder, reason, nearest


class RunIsActive(LedgerError):
    """Another process is executing this run."""

    def __init__(self, folder: Path, pid: int | None, host: str | None) -> None:
        holder = f"process {pid} on {host}" if pid is not None else "another process"
        super().__init__(
            f"{folder} is being run by {holder}: wait until it ends, or stop it first (kill -INT {pid or 'PID'})"
        )
        self.folder, self.pid, self.host = folder, pid, host


class StaleGeneration(LedgerError):
    """Another controller has taken over the run. Nothing was written."""

    def __init__(self, folder: Path, mine: int, current: int) -> None:
        super().__init__(
            f"generation {mine} may not write to {folder}: generation {current} has taken over the run; "
            "this process must end"
        )
        self.folder, self.mine, self.current = folder, mine, current


class LedgerFull(LedgerError):
    """There is no room for a write. The ledger is as it was before the write."""

    def __init__(self, path: Path, needed: int | None, free: int, why: str) -> None:
        need = f"{needed:,} bytes" if needed is not None else "a few pages"
        super().__init__(f"cannot write {path}: {need} needed, but {why}; then resume the run")
        self.path, self.needed, self.free, self.why = path, needed, free, why


class LedgerReadOnly(LedgerError):
    """The file system of the ledger may not be written to."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write {path}: {why}")
        self.path, self.why = path, why


class LedgerBusy(LedgerError):
    """The index stayed locked by another process for too long."""

    def __init__(self, path: Path, waited_s: float) -> None:
        super().__init__(f"{path} stayed locked by another process for {waited_s:g} s: find it with `fuser {path}`")
        self.path, self.waited_s = path, waited_s


class IndexDamaged(LedgerError):
    """SQLite cannot read or write the index."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}. Check the disk (dmesg) and the file (`sqlite3 {path} 'pragma integrity_check'`); "
            "restore the run folder from a copy if it is damaged"
        )
        self.path, self.reason = path, reason


class StepCorrupt(LedgerError):
    """A step file is missing, or differs from what was written."""

    def __init__(self, path: Path, step: int, reason: str, checkpoint: int | None = None) -> None:
        if checkpoint is not None and checkpoint >= step:
            remedy = f"it is not needed to resume: the checkpoint after step {checkpoint + 1} is later"
        else:
            remedy = (
                f"restore the file from a copy, or discard step {step + 1} and everything after it "
                f"(Ledger.rewind({step})), which are then generated again"
            )
        super().__init__(f"step file {path} {reason}; {remedy}")
        self.path, self.step, self.reason, self.checkpoint = path, step, reason, checkpoint


class StepConflict(LedgerError):
    """A step that is stored already was collected again, with other content."""

    def __init__(self, step: int, stored: str, given: str) -> None:
        super().__init__(
            f"step {step + 1} is already in the ledger with other rollouts (sha256 {stored[:12]}, given {given[:12]}): "
            "train on the stored ones, Ledger.rollouts(step)"
        )
        self.step, self.stored, self.given = step, stored, given


class PromptUsedTwice(LedgerError):
    """Another step has used the prompt uid."""

    def __init__(self, uid: str, step: int, earlier: int) -> None:
        super().__init__(
            f"prompt {uid!r} of step {step + 1} was already used by step {earlier + 1}: a run uses each uid once"
        )
        self.uid, self.step, self.earlier = uid, step, earlier


class StepCollected(LedgerError):
    """Completions of a step were to be kept, but the step's rollouts are complete and stored."""

    def __init__(self, step: int) -> None:
        super().__init__(f"cannot keep completions of step {step + 1}: its rollouts are stored already")
        self.step = step


class OutOfOrder(LedgerError):
    """A commit would skip a step, or weights were published before their commit."""

    def __init__(self, what: str, number: int, expected: int) -> None:
        super().__init__(f"{what} {number} is out of order: at most {expected} is possible now")
        self.what, self.number, self.expected = what, number, expected


class ConfigChanged(LedgerError):
    """A run cannot be resumed, because the new config would change its result."""

    def __init__(self, folder: Path, changes: "tuple[ConfigChange, ...]") -> None:
        refused = [change for change in changes if change.changes_result]
        lines = "\n".join(f"  {change}" for change in refused)
        super().__init__(
            f"{folder} cannot be resumed with another config: the result would change\n{lines}\n"
            "Undo these changes, or start a new run under another name"
        )
        self.folder, self.changes, self.refused = folder, changes, tuple(refused)
