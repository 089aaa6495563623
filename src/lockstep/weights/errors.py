"""What can go wrong between trainer and engines, as errors with fields."""

from collections.abc import Mapping
from pathlib import Path

from lockstep.base.errors import PicklableError


class WeightsError(PicklableError, RuntimeError):
    """Weights that cannot be written, committed or read."""


class PlanMismatch(WeightsError):
    """Two sides that do not mean the same tensors: the first `difference`, digests where two plans were compared."""

    error_code = "plan_mismatch"

    def __init__(self, difference: str, expected: str | None = None, found: str | None = None) -> None:
        digests = f" (expected digest {expected[:12]}, found {found[:12]})" if expected and found else ""
        super().__init__(
            f"the plan of the weights does not fit: {difference}{digests}; trainer and engine must load the same "
            f"architecture in the same precision"
        )
        self.difference, self.expected, self.found = difference, expected, found


class IncompleteWeights(WeightsError):
    """A version that cannot be committed: `problems` by rank or tensor."""

    def __init__(self, version: int, problems: Mapping[str, str]) -> None:
        listed = "; ".join(f"{who}: {what}" for who, what in list(problems.items())[:4])
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        super().__init__(f"version {version} of the weights is not complete: {listed}{more}")
        self.version, self.problems = version, dict(problems)


class TornWeights(WeightsError):
    """Bytes that are not those that were written: a bucket's checksum differs."""

    error_code = "torn_weights"

    def __init__(self, version: int, tensor: str, start: int, length: int) -> None:
        super().__init__(
            f"version {version} of the weights is torn: {tensor}, bytes {start} to {start + length}, has another "
            f"checksum than when it was written; publish again"
        )
        self.version, self.tensor, self.start, self.length = version, tensor, start, length


class StaleVersion(WeightsError):
    """Another version than the one that was asked for (any: None); `found` is None where nothing was
    published."""

    error_code = "stale_version"

    def __init__(self, wanted: int | None, found: int | None) -> None:
        have = "nothing was published yet" if found is None else f"the store has version {found}"
        which = "a version" if wanted is None else f"version {wanted}"
        super().__init__(f"{which} of the weights was wanted, {have}")
        self.wanted, self.found = wanted, found


class StaleWriter(WeightsError):
    """A write or commit by a process of an older generation of the run."""

    error_code = "stale_weights_generation"

    def __init__(self, mine: int, current: int) -> None:
        super().__init__(f"generation {mine} of the run tried to write weights, generation {current} is in charge")
        self.mine, self.current = mine, current


class NoRoom(WeightsError):
    """Not enough (shared) memory for the two buffers, in bytes."""

    error_code = "no_room_for_weights"

    def __init__(self, folder: Path, needed: int, available: int) -> None:
        super().__init__(
            f"{folder}: two buffers of the weights need {needed} bytes, {available} are available; enlarge /dev/shm "
            f"(docker run --shm-size, mount -o remount,size=...) or use a smaller model or dtype"
        )
        self.folder, self.needed, self.available = folder, needed, available


class NoStore(WeightsError):
    """A folder that holds no store of weights, or one that cannot be read: `problem` says which."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.folder, self.problem = folder, problem


class LinkFailed(WeightsError):
    """Weights that did not get from one node to another: over which `link`, and which `peer` was waited for."""

    error_code = "weight_link_failed"

    def __init__(self, link: str, peer: str, problem: str) -> None:
        super().__init__(f"{link}: nothing more to or from {peer}: {problem}")
        self.link, self.peer, self.problem = link, peer, problem


class BufferHeld(WeightsError):
    """Memory that a version needs, and that a reader of an older one has not let go of for so long. By `node` and
    `readers`, pids of each reader with those of its parents."""

    def __init__(self, folder: Path, node: str, readers: tuple[tuple[int, ...], ...], limit_s: float) -> None:
        pids = ", ".join(str(each[0]) for each in readers) or "unknown"
        super().__init__(
            f"{folder} on {node}: pid {pids} reads weights of an older version for {limit_s:g} s "
            f"(weights.receiver_limit_s), and the next one needs that memory; end that process"
        )
        self.folder, self.node, self.readers, self.limit_s = folder, node, readers, limit_s


class FolderFailed(WeightsError):
    """The folder through which nodes exchange files cannot be written by who sends."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} cannot be written: {problem}; make room there, or set weights.folder to another folder that all "
            f"nodes can write"
        )
        self.path, self.problem = path, problem
