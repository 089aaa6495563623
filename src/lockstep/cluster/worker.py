"""`python -m lockstep.cluster.worker`: a process that hosts one service.

Its charge is a JSON file named by `LOCKSTEP_WORKER`; the run's token comes in `LOCKSTEP_TOKEN`. Neither is an
argument, which others could read. stdout and stderr are the worker's log; SIGUSR1 writes all stacks there.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from lockstep.cluster.service import Service, load_service
from lockstep.cluster.uplink import ORPHANED, Address, Lease, Uplink
from lockstep.cluster.worker_log import prepare_log
from lockstep.watch import beacon, recorder

CHARGE = "LOCKSTEP_WORKER"
TOKEN = "LOCKSTEP_TOKEN"

log = logging.getLogger(__name__)


class Charge(msgspec.Struct, frozen=True):
    """What a worker is to be, as its file says."""

    name: str
    role: str
    rank: int
    service: str
    arguments: dict[str, Any]
    run: str
    generation: int
    host: str
    port: int
    controller_pid: int | None
    controller_start: int | None
    orphan_grace_s: float


def main() -> int:
    """Serves until it is told to leave; returns the exit code."""
    charge = msgspec.json.decode(Path(os.environ[CHARGE]).read_bytes(), type=Charge)
    token = os.environ.pop(TOKEN)
    prepare_log(charge.name)
    beacon.open_beacon(charge.run, charge.name, charge.role, charge.rank).stage("start")
    address = Address(charge.host, charge.port, token, charge.run, charge.generation, charge.name)
    uplink = Uplink(address, Lease(charge.controller_pid, charge.controller_start, charge.orphan_grace_s))
    service = Service(lambda: load_service(charge.service, charge.arguments), uplink)

    def terminate(number: int, frame: FrameType | None) -> None:
        uplink.heard()
        service.interrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uplink.start(service)
    log.info("%s, pid %d, service %s", charge.name, os.getpid(), charge.service)
    try:
        service.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        uplink.flush(1.0)
        uplink.finished()
    log.info("leaving")
    recorder.uninstall()
    beacon.close_beacon()
    return ORPHANED if uplink.orphaned else 0


if __name__ == "__main__":
    sys.exit(main())
