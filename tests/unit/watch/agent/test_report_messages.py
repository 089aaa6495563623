"""Reports of an agent: what it cannot read, and messages of other versions."""

from collections.abc import Sequence

from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import Roster, RosterCommunicator, decode_report, encode_report
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import HostDevices
from lockstep.watch.diagnosis.evidence_types import CommunicatorInfo


class _Unreadable(DeviceSampler):
    """Devices of a host where /proc shows nothing of the processes."""

    def report(self, tracked: Sequence[tuple[int, int]] = ()) -> HostDevices:
        raise PermissionError(13, "Permission denied", "/proc/7/environ")


def test_devices_that_cannot_be_read_are_a_gap_of_the_report() -> None:
    _, state = ReportBuilder("a", devices=_Unreadable()).build(ProcessMonitor("run-1"))
    assert "Permission denied: '/proc/7/environ'" in state.devices.gap


def test_fields_that_an_older_agent_does_not_send_have_their_defaults() -> None:
    about = CommunicatorInfo("0", "fsdp", "gloo", "late (3)")
    roster = Roster("a", 1, communicators=(RosterCommunicator("b", about, 2, (0, 1), "world"),))
    message = encode_report(roster)
    assert decode_report(message) == roster
    for kept, rendezvous, of in ((7, "", "world"), (6, "", "")):
        older = message | {"communicators": [row[:kept] for row in message["communicators"]]}
        decoded = decode_report(older)
        assert isinstance(decoded, Roster)
        (found,) = decoded.communicators
        assert (found.key, found.about.rendezvous, found.of, found.ranks) == ("b", rendezvous, of, (0, 1))


def test_fields_that_a_newer_agent_adds_are_ignored() -> None:
    roster = Roster("a", 1, communicators=(RosterCommunicator("b", CommunicatorInfo("0"), 2, (0, 1)),))
    message = encode_report(roster)
    newer = message | {"communicators": [[*row, "more"] for row in message["communicators"]]}
    assert decode_report(newer) == roster
