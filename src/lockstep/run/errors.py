"""Why a run did not start or did not end well."""

from pathlib import Path


class RunRefused(Exception):
    """The run cannot start as asked; nothing was started and nothing on disk was touched."""


class Interrupted(Exception):
    """The user asked to stop (Ctrl-C); what is finished is durable and the run can be resumed."""


class NotStarted(RuntimeError):
    """A new run whose roles could not start; nothing was trained. Its `__cause__` is why.

    Args:
        folder: whose name is free again.
        kept: where the folder with the logs is now; None where it could not be moved.
    """

    def __init__(self, folder: Path, kept: Path | None) -> None:
        where = f"its folder is kept as {kept}" if kept is not None else "its folder could not be moved"
        super().__init__(f"{folder} did not start; {where}")
        self.folder, self.kept = folder, kept


class RunFinished(Exception):
    """The run that was to go on has come to its end already; nothing was started and nothing on disk was touched."""


class GaveUp(RuntimeError):
    """A failure that recovery does not heal (any more). Its `__cause__` is the failure itself.

    Args:
        worker: what failed.
        what: how, after its name.
        reason: why it was not restarted.
    """

    def __init__(self, worker: str, what: str, reason: str) -> None:
        super().__init__(f"{worker} {what}, and is not restarted: {reason}")
        self.worker, self.what, self.reason = worker, what, reason
