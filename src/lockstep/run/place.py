"""Where a run's processes say what they do: the run id, and the shared memory that belongs to it."""

import logging
import shutil
from pathlib import Path

from lockstep.ledger.files import replace
from lockstep.watch.beacon import alive, new_run_id, read_beacons, run_dir

log = logging.getLogger(__name__)

RUN_ID = "run-id"


def take_place(folder: Path, name: str) -> str:
    """A new run id for the run in `folder`, written there for `lockstep top`.

    Shared memory that processes of an earlier attempt left when they were killed is given back: their beacons, and
    twice the weights. Call it with the ledger's lock held.
    """
    try:
        previous = (folder / RUN_ID).read_text().strip()
    except FileNotFoundError:
        previous = ""
    if previous:
        _give_back(previous)
    run = new_run_id(name)
    replace(folder / RUN_ID, f"{run}\n".encode())
    return run


def _give_back(run: str) -> None:
    """Where a process of it is still alive, so is their agent, which does it when it leaves."""
    living = [state.name for state in read_beacons(run) if alive(state.pid, state.start_ticks)]
    if living:
        log.info("%s of the earlier attempt %s are still leaving", ", ".join(living), run)
        return
    shutil.rmtree(run_dir(run), ignore_errors=True)
