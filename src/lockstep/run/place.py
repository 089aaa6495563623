"""Where a run's processes say what they do: the run id, and the shared memory that belongs to it."""

import logging
import shutil
import socket
from pathlib import Path

from lockstep.ledger.files import replace
from lockstep.watch.beacon import alive, new_run_id, read_beacons, run_dir

log = logging.getLogger(__name__)

RUN_ID = "run-id"


class FolderNotShared(RuntimeError):
    """A trainer rank does not see the run's folder, into which it writes checkpoints and exports."""

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(
            f"{host} has a trainer rank and does not see the run's folder {folder}: set folder to one on a file system "
            "that all nodes with trainer ranks share with the host that starts the run, or place the ranks on that host"
        )
        self.folder, self.host = folder, host


def run_id(folder: Path) -> str:
    """As `take_place` wrote it; empty where nothing did."""
    try:
        return (folder / RUN_ID).read_text().strip()
    except FileNotFoundError:
        return ""


def must_share(folder: Path, expected: str) -> None:
    """Raises FolderNotShared where this host's folder is not the one of the run with that id."""
    if run_id(folder) != expected:
        raise FolderNotShared(folder, socket.gethostname())


def take_place(folder: Path, name: str) -> str:
    """A new run id for the run in `folder`, written there for `lockstep top`. Call it with the ledger's lock held."""
    release_place(folder)
    run = new_run_id(name)
    replace(folder / RUN_ID, f"{run}\n".encode())
    return run


def release_place(folder: Path) -> None:
    """Gives the shared memory back that processes of the run left when they were killed: their beacons, and twice the
    weights. Where one of them is still alive, so is their agent, which does it when it leaves."""
    run = run_id(folder)
    if not run:
        return
    living = [state.name for state in read_beacons(run) if alive(state.pid, state.start_ticks)]
    if living:
        log.info("%s of the earlier attempt %s are still leaving", ", ".join(living), run)
    else:
        shutil.rmtree(run_dir(run), ignore_errors=True)
