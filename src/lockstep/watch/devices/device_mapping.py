"""Which process uses which device.

The driver lists the pids that use each device, but knows nothing of pid namespaces: in a container the pids may be
those of the host (https://github.com/NVIDIA/nvidia-docker/issues/1483), and depending on the driver they may differ
from one call to another (https://github.com/Project-HAMi/HAMi-core/issues/112). So a pid of the list counts only if the
process has the device's file open, as far as its files can be read. Without a pid, the only device file that a process
has open tells its device, and at last CUDA_VISIBLE_DEVICES with the local rank.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.watch.devices.device_samples import DeviceSample
from lockstep.watch.procfs import processes

LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
REFRESH_S = 5.0
"""Processes open devices when they first use them, so that each is looked at again after this time, and after twice the
time whenever nothing has changed, up to `STABLE_REFRESH_S`."""
STABLE_REFRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel knows of a process and shows its device."""

    pids: frozenset[int]
    """Of the process and its descendants."""
    minors: frozenset[int] | None = None
    """The numbers of the device files that they have open; None if their files cannot be read."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment that the process started with."""


def devices_of(facts: ProcessFacts, devices: Sequence[DeviceSample]) -> tuple[tuple[int, ...], str]:
    """The devices that a process uses, as indices into `devices`, and how this is known (`DeviceUse.source`)."""
    partitioned = {each.parent for each in devices if each.parent}
    usable = [number for number, each in enumerate(devices) if each.uuid not in partitioned]
    if facts.minors is not None:
        usable = [number for number in usable if devices[number].minor in (None, *facts.minors)]
    listed = [number for number in usable if any(each.pid in facts.pids for each in devices[number].processes or ())]
    if listed:
        return tuple(listed), "driver"
    if facts.minors and len(usable) == 1 and devices[usable[0]].minor is not None:
        return tuple(usable), "file"
    if facts.minors is not None and not facts.minors:
        return (), ""  # it has not opened any device
    chosen = _of_environment(facts.variables, devices)
    return ((chosen,), "environment") if chosen in usable else ((), "")


def visible_devices(variables: Mapping[str, str], devices: Sequence[DeviceSample]) -> list[int] | None:
    """The devices that CUDA shows a process, in CUDA's order, as indices into `devices`. None if it is not known which
    device a number stands for: without CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA numbers the fastest device first.

    As in CUDA, the list ends before its first invalid entry
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars).
    """
    gpus = {each.index: number for number, each in enumerate(devices) if not each.parent}
    numbers_known = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({each.name for each in devices}) <= 1
    numbers_known &= not any(each.parent for each in devices)
    text = variables.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return [gpus[index] for index in sorted(gpus)] if numbers_known else None
    found: list[int] = []
    for word in (each.strip() for each in text.split(",")):
        if re.fullmatch(r"\d+", word) and not numbers_known:
            return None
        number = gpus.get(int(word)) if re.fullmatch(r"\d+", word) else _by_uuid(word, devices)
        if number is None or number in found:
            break
        found.append(number)
    return found


def _by_uuid(word: str, devices: Sequence[DeviceSample]) -> int | None:
    """The device with a uuid, of which the beginning is enough if it is unique."""
    if not word.startswith(("GPU-", "MIG-")):
        return None
    matching = [number for number, each in enumerate(devices) if each.uuid.lower().startswith(word.lower())]
    return matching[0] if len(matching) == 1 else None


def _of_environment(variables: Mapping[str, str], devices: Sequence[DeviceSample]) -> int | None:
    visible = visible_devices(variables, devices)
    if not visible:
        return None
    if len(visible) == 1:
        return visible[0]
    ranks = (variables.get(name, "") for name in LOCAL_RANK_VARIABLES)
    local = next((int(each) for each in ranks if each.isdecimal()), None)
    return visible[local] if local is not None and local < len(visible) else None


def open_minors(pids: Iterable[int], prefix: str = "/dev/nvidia") -> frozenset[int] | None:
    """The numbers N of the device files /dev/nvidiaN that these processes have open; None if no process's files can be
    read."""
    found, readable = set(), False
    for pid in pids:
        files = processes.open_files(pid)
        if files is None:
            continue
        readable = True
        found |= {int(path.removeprefix(prefix)) for path, _ in files if re.fullmatch(re.escape(prefix) + r"\d+", path)}
    return frozenset(found) if readable else None


def process_facts(pid: int, own_entries: Collection[int] = ()) -> ProcessFacts:
    """Reads the facts about a process from /proc. Descendants that are `own_entries` are left out."""
    pids = frozenset({pid, *(each for each in processes.descendant_pids(pid) if each not in own_entries)})
    return ProcessFacts(pids, open_minors(pids), processes.environment(pid))


@dataclass(slots=True)
class _Remembered:
    facts: ProcessFacts
    looked_at: float
    refresh_s: float
    """Seconds from the last look to the next."""
    devices: tuple[str, ...] = ()
    """Uuids of the devices that it was last known to use."""
    source: str = ""

    def is_due(self, now: float) -> bool:
        return now - self.looked_at >= self.refresh_s


def _looked_again(known: _Remembered | None, facts: ProcessFacts, now: float) -> _Remembered:
    if known is None:
        return _Remembered(facts, now, REFRESH_S)
    refresh_s = REFRESH_S if facts != known.facts else min(2 * known.refresh_s, STABLE_REFRESH_S)
    return replace(known, facts=facts, looked_at=now, refresh_s=refresh_s)


class DeviceMapping:
    """Remembers which process uses which device, and looks again from time to time, soon if the job has other processes
    or the driver lists other pids. What was known last holds for a process that has ended and for a device that is
    lost, of which the driver lists no processes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Remembered] = {}
        self._pids: tuple[frozenset[tuple[int, int]], frozenset[int]] = frozenset(), frozenset()
        """The job's processes and the pids that the driver lists."""

    def uses(
        self, tracked: Sequence[tuple[int, int]], devices: Sequence[DeviceSample]
    ) -> list[tuple[ProcessFacts, tuple[int, ...], str]]:
        """The facts about each of the processes, given by pid and start time, its devices as indices into `devices`,
        and how these are known."""
        now, pids = time.monotonic(), {pid for pid, _ in tracked}
        by_uuid = {each.uuid: number for number, each in enumerate(devices)}
        self._notice_changes(tracked, devices)
        # Reading all files of many processes takes long: of those that are due, one is looked at again per report.
        old = [each for each in tracked if each in self._known and self._known[each].is_due(now)]
        due = min(old, key=lambda each: self._known[each].looked_at, default=None)
        for each in tracked:
            known = self._known.get(each)
            living = processes.is_alive(each[0], each[1] or None)
            if each == due and known is not None:
                known.looked_at = now  # one that has ended must not stay the oldest
            if known is None or (living and each == due):
                facts = process_facts(each[0], pids) if living else ProcessFacts(frozenset())
                known = self._known[each] = _looked_again(known, facts, now)
            lost = [uuid for uuid in known.devices if uuid in by_uuid and devices[by_uuid[uuid]].lost]
            if living and not lost:
                found, source = devices_of(known.facts, devices)
                known.devices, known.source = tuple(devices[number].uuid for number in found), source
        self._known = {each: self._known[each] for each in tracked}
        return [
            (each.facts, tuple(by_uuid[uuid] for uuid in each.devices if uuid in by_uuid), each.source)
            for each in self._known.values()
        ]

    def _notice_changes(self, tracked: Sequence[tuple[int, int]], devices: Sequence[DeviceSample]) -> None:
        listed = frozenset(user.pid for each in devices for user in each.processes or ())
        pids = frozenset(tracked), listed
        if pids != self._pids:
            self._pids = pids
            for known in self._known.values():
                known.refresh_s = REFRESH_S
