"""Where a run's processes say what they do: the run id, and the shared memory that belongs to it."""

import logging
import shutil
from pathlib import Path

from lockstep.ledger.files import replace
from lockstep.watch.beacon import alive, new_run_id, read_beacons, run_dir

log = logging.getLogger(__name__)

RUN_ID = "run-id"


def take_place(folder: Path, name: str) -> str:
    """A new run id for the run in `folder`, written there for `lockstep top`. Call it with the ledger's lock held."""
    release_place(folder)
    run = new_run_id(name)
    replace(folder / RUN_ID, f"{run}\n".encode())
    return run


def release_place(folder: Path) -> None:
    """Gives the shared memory back that processes of the run left when they were killed: their beacons, and twice the
    weights. Where one of them is still alive, so is their agent, which does it when it leaves."""
    try:
        run = (folder / RUN_ID).read_text().strip()
    except FileNotFoundError:
        return
    if not run:
        return
    living = [state.name for state in read_beacons(run) if alive(state.pid, state.start_ticks)]
    if living:
        log.info("%s of the earlier attempt %s are still leaving", ", ".join(living), run)
    else:
        shutil.rmtree(run_dir(run), ignore_errors=True)
