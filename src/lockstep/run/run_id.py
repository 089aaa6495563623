"""The run id in the run's folder, and the shared memory that belongs to it."""

import logging
import shutil
import socket
from pathlib import Path

from lockstep.base import folders
from lockstep.base.folders import new_run_id, remove_stale_run_dirs, run_shm_dir
from lockstep.ledger.durable_files import replace_file
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs.processes import is_alive

log = logging.getLogger(__name__)

RUN_ID_FILE = "run-id"


class FolderNotShared(RuntimeError):
    """A trainer rank cannot see the run's folder, to which it writes checkpoints and exports."""

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(
            f"{host} has a trainer rank and cannot see the run's folder {folder}: set folder to a path on a file "
            "system that all nodes with trainer ranks share with the host that starts the run, or place the ranks on "
            "that host"
        )
        self.folder, self.host = folder, host


def read_run_id(folder: Path) -> str:
    """Returns the id that `claim_run_id` wrote; "" if there is none, or if the file is damaged."""
    try:
        return folders.read_run_id(folder / RUN_ID_FILE)
    except FileNotFoundError:
        return ""
    except ValueError as error:
        log.warning("%s", error)
        return ""


def check_folder_shared(folder: Path, expected: str) -> None:
    """Raises FolderNotShared if the folder, as this host sees it, is not that of the run with this id."""
    if read_run_id(folder) != expected:
        raise FolderNotShared(folder, socket.gethostname())


def claim_run_id(folder: Path, name: str) -> str:
    """Writes a new run id into the folder, for `lockstep top`, and returns it. The caller holds the ledger's lock."""
    release_shared_memory(folder)
    remove_stale_run_dirs()
    run = new_run_id(name)
    replace_file(folder / RUN_ID_FILE, f"{run}\n".encode())
    return run


def release_shared_memory(folder: Path) -> None:
    """Deletes the shared memory that killed processes of the run left behind: their beacons, and two copies of the
    weights. Deletes nothing while a process of the run is alive: then its agent deletes the shared memory at the
    end."""
    run = read_run_id(folder)
    if not run:
        return
    alive = [state.name for state in read_beacons(run) if is_alive(state.pid, state.start_ticks)]
    if alive:
        log.info("%s of the earlier attempt %s are still running", ", ".join(alive), run)
    else:
        shutil.rmtree(run_shm_dir(run), ignore_errors=True)
