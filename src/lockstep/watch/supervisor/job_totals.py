"""What a supervisor sums up over a whole job, and writes for reports: GPUs (`device_totals`) and collectives
(`communication.arrival_totals`)."""

from pathlib import Path

from lockstep.watch.agent.call_timings import ASYNCHRONOUS, ON_DEVICE, TIMING_RECORD
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry
from lockstep.watch.supervisor.device_totals import DeviceTotals
from lockstep.watch.supervisor.evidence_builder import HostState


class JobTotals:
    """Adds the reports of hosts.

    Args:
        devices, communication: the files; None writes none.
    """

    def __init__(self, run: str, devices: Path | None, communication: Path | None) -> None:
        self._devices = DeviceTotals(devices)
        self._arrivals = None if communication is None else ArrivalTotals(communication, run)

    def add(self, host: HostState, offset_ns: int) -> None:
        """Adds the newest report of a host.

        Args:
            offset_ns: how far the host's clock is ahead of this host's.

        Raises:
            ValueError: the report names a communicator or a rank that the roster does not have.
        """
        self._devices.add(host)
        if self._arrivals is not None:
            add_timings(self._arrivals, host, offset_ns)

    def write(self, now: float, last: bool = False) -> None:
        """Writes the files if it is time, or at the end."""
        self._devices.write(now, last)
        if self._arrivals is not None:
            self._arrivals.write(now, last)


def add_timings(totals: ArrivalTotals, host: HostState, offset_ns: int) -> None:
    """Adds the sampled calls of a host's newest report; see `JobTotals.add`."""
    report = host.state
    if report is None or not report.timings:
        return
    if len(report.timings) % TIMING_RECORD.size:
        raise ValueError(
            f"state of host {report.host}: {len(report.timings)} bytes of timings, not a multiple of "
            f"{TIMING_RECORD.size}"
        )
    totals.describe(report.timed)
    totals.set_offset(report.host, offset_ns)
    roster = host.roster
    processes = {(each.communicator, each.rank): roster.processes[each.process].name for each in roster.members}
    for number, life, rank, issued, signature, entered, took, shift, flags in TIMING_RECORD.iter_unpack(report.timings):
        if (number, rank) not in processes:
            raise ValueError(
                f"state of host {report.host}: a call of rank {rank} of communicator {number}, not a member"
            )
        of = roster.communicators[number]
        entry = Entry(report.host, entered, took, signature, shift, bool(flags & ASYNCHRONOUS))
        totals.add(
            of.key, of.about.name, of.about.backend, of.size, (life, issued), rank, processes[number, rank], entry,
            on_device=bool(flags & ON_DEVICE),
        )  # fmt: skip
