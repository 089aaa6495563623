"""Errors for a run that did not start or did not end well."""

from pathlib import Path


class RunRefused(Exception):
    """The run cannot start as requested. Nothing was started, and nothing on disk was touched."""


class Interrupted(Exception):
    """The user stopped the run (Ctrl-C). Finished work is durable, and the run can be resumed."""


class NotStarted(RuntimeError):
    """The processes of a new run could not start; nothing was trained. `__cause__` is the reason.

    Args:
        folder: the folder that the run was to have; its name is free again.
        kept: the new path of the folder, which contains the logs; None if it could not be moved.
    """

    def __init__(self, folder: Path, kept: Path | None) -> None:
        where = f"its folder is kept as {kept}" if kept is not None else "its folder could not be moved"
        super().__init__(f"{folder} did not start; {where}")
        self.folder, self.kept = folder, kept


class RunFinished(Exception):
    """The run to resume has already finished. Nothing was started, and nothing on disk was touched."""


class GaveUp(RuntimeError):
    """A worker failed and is not restarted (again). `__cause__` is the failure itself.

    Args:
        worker: the worker that failed.
        what: how it failed, as a verb phrase (`died (SIGKILL)`).
        reason: why it was not restarted.
    """

    def __init__(self, worker: str, what: str, reason: str) -> None:
        super().__init__(f"{worker} {what}, and is not restarted: {reason}")
        self.worker, self.what, self.reason = worker, what, reason
