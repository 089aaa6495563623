"""The folder that relative paths in a run's config refer to: the one in which the run began."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.ledger.ledger import Ledger

START_EVENT = "start"
"""The ledger event of every start of a run, with the number of rows in use, the choices for `trainer.compile: auto`,
and the folders of `start_folders`."""
_RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it in the driver of a job, whose working folder is deleted after the job."""


def start_folders(run: Path) -> dict[str, str]:
    """Fields for the event of a start: where the run is, and from where it was started."""
    if _RAY_JOB_VARIABLE in os.environ:
        return {}
    return {"working_folder": str(Path.cwd()), "run_folder": str(run.resolve())}


def working_folder(run: Path) -> Path:
    """Returns the folder that relative paths in a run's config refer to.

    It is the folder in which the run began, or if that was moved with the run inside it, where it is now. It is the
    current folder if that one is gone or unknown, as for runs of earlier versions.

    Raises:
        LedgerError: this is not the folder of a run.
    """
    with Ledger.reader(run) as ledger:
        starts = [event.fields for event in ledger.events() if event.kind == START_EVENT]
    if not starts or "working_folder" not in starts[0]:
        return Path.cwd()
    began, was = Path(str(starts[0]["working_folder"])), Path(str(starts[0]["run_folder"]))
    now = run.resolve()
    if now != was and was.is_relative_to(began):
        inside = was.relative_to(began).parts
        above = len(now.parts) - len(inside)
        if now.parts[above:] == inside:
            return Path(*now.parts[:above])
    return began if began.is_dir() else Path.cwd()


@contextmanager
def in_working_folder(run: Path) -> Iterator[Path]:
    """Changes to the working folder of a run. Yields the path of the run's folder from there. Raises what
    `working_folder` raises."""
    folder = working_folder(run)
    if folder == Path.cwd():
        yield run
        return
    run = run.absolute()
    with contextlib.chdir(folder):
        yield run
