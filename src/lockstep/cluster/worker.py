"""`python -m lockstep.cluster.worker`: a process that hosts one service.

Its charge is a JSON file named by `LOCKSTEP_WORKER`; the run's token comes in `LOCKSTEP_TOKEN`. Neither is an
argument, which others could read. Who its controller is says the run's shared memory (`watch.leader`). stdout and
stderr are the worker's log; SIGUSR1 writes all stacks there.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from lockstep.cluster.charge import CHARGE, Charge
from lockstep.cluster.service import Service, load_service
from lockstep.cluster.uplink import ORPHANED, Uplink
from lockstep.cluster.worker_log import prepare_log
from lockstep.watch import beacon, recorder
from lockstep.watch.leader import Leader

TOKEN = "LOCKSTEP_TOKEN"

log = logging.getLogger(__name__)


def main() -> int:
    """Serves until it is told to leave; returns the exit code."""
    charge = Charge.read(Path(os.environ[CHARGE]))
    token = os.environ.pop(TOKEN)
    prepare_log(charge.name)
    leader = Leader.read(charge.run)
    if leader is None or leader.generation != charge.generation:
        log.warning("the controller that ordered this worker (generation %d) has the run no more", charge.generation)
        return ORPHANED
    beacon.open_beacon(charge.run, charge.name, charge.role, charge.rank).stage("start")
    uplink = Uplink(charge.run, charge.name, token, leader)
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
