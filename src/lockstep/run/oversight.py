"""A supervisor beside the run: who is waited for is told, kept, and handed to recovery."""

import sys

from lockstep.cluster.base import AgentCluster
from lockstep.config.roles import TOGETHER
from lockstep.report.summary import versions
from lockstep.run.monitor import Monitor
from lockstep.run.prepare import Prepared
from lockstep.run.recovery.recovery import Recovery
from lockstep.watch.assemble import Alias
from lockstep.watch.verdict import Patience


def oversee(prepared: Prepared, cluster: AgentCluster, monitor: Monitor, recovery: Recovery) -> None:
    """Starts the supervisor that the config asks for, if it does. The run goes on at once."""
    config = prepared.config.watch
    if not config.enable:
        return
    recovers = config.on_stall == "recover" and prepared.config.recovery.enable
    if recovers:
        recovery.listen(monitor.stalls, cluster.kill)
    cluster.supervise(
        Patience(notice_s=config.notice_s, still_s=config.confirm_after_s),
        monitor.stalls.hear,
        on_stall="free" if recovers else "dump" if config.on_stall == "dump" else "report",
        aliases={name: Alias(role) for name, role in TOGETHER.items()},
        facts={
            "config": prepared.config.model_dump(mode="json"),
            "versions": versions(),
            "command": sys.argv,
            "folder": str(prepared.folder),
        },
    )
