"""Errors of weight sync between trainer and engines."""

from collections.abc import Mapping
from pathlib import Path

from lockstep.base.errors import PicklableError


class WeightsError(PicklableError, RuntimeError):
    """Weights cannot be written, committed or read."""


class PlanMismatch(WeightsError):
    """Two sides expect different tensors. `difference` describes the first one; the digests of the plans are given if
    plans were compared."""

    error_code = "plan_mismatch"

    def __init__(self, difference: str, expected: str | None = None, found: str | None = None) -> None:
        digests = f" (expected digest {expected[:12]}, found {found[:12]})" if expected and found else ""
        super().__init__(
            f"the weight plans of trainer and engine differ: {difference}{digests}; both must load the same "
            f"architecture in the same precision"
        )
        self.difference, self.expected, self.found = difference, expected, found


class IncompleteWeights(WeightsError):
    """A version cannot be committed. `problems` are by rank or tensor."""

    def __init__(self, version: int, problems: Mapping[str, str]) -> None:
        listed = "; ".join(f"{part}: {problem}" for part, problem in list(problems.items())[:4])
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        super().__init__(f"version {version} of the weights is not complete: {listed}{more}")
        self.version, self.problems = version, dict(problems)


class TornWeights(WeightsError):
    """A checksum does not match: the bytes differ from those that were written."""

    error_code = "torn_weights"

    def __init__(self, version: int, tensor: str, start: int, length: int) -> None:
        super().__init__(
            f"version {version} of the weights is torn: the checksum of {tensor}, bytes {start} to {start + length}, "
            f"differs from the checksum when it was written; publish again"
        )
        self.version, self.tensor, self.start, self.length = version, tensor, start, length


class StaleVersion(WeightsError):
    """The store does not have the requested version. `wanted` is None if any version was requested; `found` is None if
    nothing was published."""

    error_code = "stale_version"

    def __init__(self, wanted: int | None, found: int | None) -> None:
        have = "nothing was published yet" if found is None else f"the store has version {found}"
        which = "a version" if wanted is None else f"version {wanted}"
        super().__init__(f"{which} of the weights was requested, {have}")
        self.wanted, self.found = wanted, found


class StaleWriter(WeightsError):
    """A process of an older generation of the run tried to write or commit."""

    error_code = "stale_weights_generation"

    def __init__(self, mine: int, current: int) -> None:
        super().__init__(
            f"generation {mine} of the run tried to write weights, but generation {current} has taken over"
        )
        self.mine, self.current = mine, current


class NoRoom(WeightsError):
    """There is not enough shared memory for the two buffers. `needed` and `available` are bytes."""

    error_code = "no_room_for_weights"

    def __init__(self, folder: Path, needed: int, available: int) -> None:
        super().__init__(
            f"{folder}: two buffers of the weights need {needed} bytes, {available} are available; enlarge /dev/shm "
            f"(docker run --shm-size, mount -o remount,size=...) or use a smaller model or dtype"
        )
        self.folder, self.needed, self.available = folder, needed, available


class NoStore(WeightsError):
    """A folder holds no weight store, or one that cannot be read."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.folder, self.problem = folder, problem


class LinkFailed(WeightsError):
    """A transfer of weights failed on `link`, while waiting for `peer`."""

    error_code = "weight_link_failed"

    def __init__(self, link: str, peer: str, problem: str) -> None:
        super().__init__(f"{link}: the connection to {peer} failed: {problem}")
        self.link, self.peer, self.problem = link, peer, problem


class BufferHeld(WeightsError):
    """Readers of an older version have held the buffer that the next version needs for too long. `readers` has the pid
    of each reader, followed by those of its parents."""

    def __init__(self, folder: Path, node: str, readers: tuple[tuple[int, ...], ...], limit_s: float) -> None:
        pids = ", ".join(str(each[0]) for each in readers) or "unknown"
        super().__init__(
            f"{folder} on {node}: pid {pids} has been reading weights of an older version for {limit_s:g} s "
            f"(weights.receiver_limit_s), and the next version needs that memory; end that process"
        )
        self.folder, self.node, self.readers, self.limit_s = folder, node, readers, limit_s


class FolderFailed(WeightsError):
    """The sender cannot write to the folder through which nodes exchange files."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} cannot be written: {problem}; make room there, or set weights.folder to another folder that all "
            f"nodes can write"
        )
        self.path, self.problem = path, problem
