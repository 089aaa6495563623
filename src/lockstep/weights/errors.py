"""What can go wrong between trainer and engines, as errors with fields."""

from collections.abc import Mapping
from pathlib import Path


class WeightsError(RuntimeError):
    """Weights that cannot be written, committed or read."""


class PlanMismatch(WeightsError):
    """Two sides that do not mean the same tensors: the first `difference`, digests where two plans were compared."""

    def __init__(self, difference: str, expected: str | None = None, found: str | None = None) -> None:
        digests = f" (expected digest {expected[:12]}, found {found[:12]})" if expected and found else ""
        super().__init__(
            f"the plan of the weights does not fit: {difference}{digests}; trainer and engine must load the same "
            f"architecture in the same precision"
        )
        self.difference, self.expected, self.found = difference, expected, found

    def __reduce__(self) -> tuple[type["PlanMismatch"], tuple[str, str | None, str | None]]:
        return type(self), (self.difference, self.expected, self.found)


class IncompleteWeights(WeightsError):
    """A version that cannot be committed: `problems` by rank or tensor."""

    def __init__(self, version: int, problems: Mapping[str, str]) -> None:
        listed = "; ".join(f"{who}: {what}" for who, what in list(problems.items())[:4])
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        super().__init__(f"version {version} of the weights is not complete: {listed}{more}")
        self.version, self.problems = version, dict(problems)

    def __reduce__(self) -> tuple[type["IncompleteWeights"], tuple[int, dict[str, str]]]:
        return type(self), (self.version, self.problems)


class TornWeights(WeightsError):
    """Bytes that are not those that were written: a bucket's checksum differs."""

    def __init__(self, version: int, tensor: str, start: int, length: int) -> None:
        super().__init__(
            f"version {version} of the weights is torn: {tensor}, bytes {start} to {start + length}, has another "
            f"checksum than when it was written; publish again"
        )
        self.version, self.tensor, self.start, self.length = version, tensor, start, length

    def __reduce__(self) -> tuple[type["TornWeights"], tuple[int, str, int, int]]:
        return type(self), (self.version, self.tensor, self.start, self.length)


class StaleVersion(WeightsError):
    """Another version than the one that was asked for (any: None); `found` is None where nothing was published."""

    def __init__(self, wanted: int | None, found: int | None) -> None:
        have = "nothing was published yet" if found is None else f"the store has version {found}"
        which = "a version" if wanted is None else f"version {wanted}"
        super().__init__(f"{which} of the weights was wanted, {have}")
        self.wanted, self.found = wanted, found

    def __reduce__(self) -> tuple[type["StaleVersion"], tuple[int | None, int | None]]:
        return type(self), (self.wanted, self.found)


class StaleGeneration(WeightsError):
    """A write or commit by a process of an older generation of the run."""

    def __init__(self, mine: int, current: int) -> None:
        super().__init__(f"generation {mine} of the run tried to write weights, generation {current} is in charge")
        self.mine, self.current = mine, current

    def __reduce__(self) -> tuple[type["StaleGeneration"], tuple[int, int]]:
        return type(self), (self.mine, self.current)


class NoRoom(WeightsError):
    """Not enough (shared) memory for the two buffers, in bytes."""

    def __init__(self, folder: Path, needed: int, available: int) -> None:
        super().__init__(
            f"{folder}: two buffers of the weights need {needed} bytes, {available} are available; enlarge /dev/shm "
            f"(docker run --shm-size, mount -o remount,size=...) or use a smaller model or dtype"
        )
        self.folder, self.needed, self.available = folder, needed, available

    def __reduce__(self) -> tuple[type["NoRoom"], tuple[Path, int, int]]:
        return type(self), (self.folder, self.needed, self.available)


class NoStore(WeightsError):
    """A folder that holds no store of weights, or one that cannot be read: `problem` says which."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.folder, self.problem = folder, problem

    def __reduce__(self) -> tuple[type["NoStore"], tuple[Path, str]]:
        return type(self), (self.folder, self.problem)


class LinkFailed(WeightsError):
    """Weights that did not get from one node to another: over which `link`, and which `peer` was waited for."""

    def __init__(self, link: str, peer: str, problem: str) -> None:
        super().__init__(f"{link}: nothing more to or from {peer}: {problem}")
        self.link, self.peer, self.problem = link, peer, problem

    def __reduce__(self) -> tuple[type["LinkFailed"], tuple[str, str, str]]:
        return type(self), (self.link, self.peer, self.problem)
