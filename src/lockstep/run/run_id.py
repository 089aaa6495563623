"""The run id in the run's folder, and the shared memory that belongs to it."""

import logging
import shutil
import socket
from pathlib import Path

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.ledger.durable_files import replace_file
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs.processes import is_alive

log = logging.getLogger(__name__)

RUN_ID_FILE = "run-id"


class FolderNotShared(RuntimeError):
    """A trainer rank does not see the run's folder, into which it writes checkpoints and exports."""

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(
            f"{host} has a trainer rank and does not see the run's folder {folder}: set folder to one on a file system "
            "that all nodes with trainer ranks share with the host that starts the run, or place the ranks on that host"
        )
        self.folder, self.host = folder, host


def read_run_id(folder: Path) -> str:
    """As `claim_run_id` wrote it; empty where nothing did."""
    try:
        return (folder / RUN_ID_FILE).read_text().strip()
    except FileNotFoundError:
        return ""


def check_folder_shared(folder: Path, expected: str) -> None:
    """Raises FolderNotShared where this host's folder is not the one of the run with that id."""
    if read_run_id(folder) != expected:
        raise FolderNotShared(folder, socket.gethostname())


def claim_run_id(folder: Path, name: str) -> str:
    """A new run id for the run in `folder`, written there for `lockstep top`. Call it with the ledger's lock held."""
    release_shared_memory(folder)
    run = new_run_id(name)
    replace_file(folder / RUN_ID_FILE, f"{run}\n".encode())
    return run


def release_shared_memory(folder: Path) -> None:
    """Gives the shared memory back that processes of the run left when they were killed: their beacons, and twice the
    weights. Where one of them is still alive, so is their agent, which does it when it leaves."""
    run = read_run_id(folder)
    if not run:
        return
    living = [state.name for state in read_beacons(run) if is_alive(state.pid, state.start_ticks)]
    if living:
        log.info("%s of the earlier attempt %s are still leaving", ", ".join(living), run)
    else:
        shutil.rmtree(run_shm_dir(run), ignore_errors=True)
