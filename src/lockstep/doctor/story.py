"""What happened in a job, put together from all sources: attempts, who was there, how far each got, who ended how.

Nothing here knows of classes; rules and the judge ask for traits.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from lockstep.doctor.attempts import last_start, old_sources
from lockstep.doctor.prefixes import Who
from lockstep.doctor.sightings import Reading, Sighting, Tick
from lockstep.doctor.tracebacks import Traceback

TRAITS = {
    "ended_well": "the last attempt says that it is done, and nothing fatal came after that",
    "running": "no end is to be seen: counters moved on after whatever failed",
    "progressed": "steps were made before the first failure",
    "collective_timeout": "a rank timed out in a collective",
    "peer_lost": "a rank lost the connection to a peer",
    "first_collective": "it was the first collective of the group that timed out",
    "scalar": "the collective that timed out had one element: a barrier, a flag, a loss",
    "silent_ranks": "some ranks did not report the time-out that their peers report",
    "mismatch": "the ranks called different collectives, or with different shapes",
    "saving": "a checkpoint was begun and not finished when the ranks waited",
    "crashed": "a process ended with a crash, a signal or an exit code that is not zero",
    "exception": "a rank raised an exception that no collective raised",
    "one_rank": "only one rank or process is known",
    "many_hosts": "more than one host takes part",
    "foreign_address": "a connection was tried to an address outside of the networks that Ray knows the hosts in",
}
"""What `story:` in a condition may ask for."""

_LASTING = ("gpu_hardware_fault",)
"""Classes that the next attempt has too when it gets the same hosts."""
_LAST = 4
_TROUBLE = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|[A-Z]\w*Error|failed|Killed|killed|[Aa]borted|crashed|OOM|out of memory|marked dead)\b"
    r"|^\[[^\]]{10,40} [EF] \d+ \d+\]|\berror:"
)
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_MOST_RANKS = 100_000
_SURVIVED_STEPS = 2


@dataclass(frozen=True, slots=True)
class Timeout:
    """A rank waited in a collective until its time-out."""

    who: Who
    operation: str
    seq: int | None
    numel: int | None
    ran_ms: float | None
    timeout_ms: float | None
    sighting: Sighting


@dataclass
class Story:
    """All sightings in the order of time, of the last attempt and of earlier ones."""

    readings: Sequence[Reading]
    sightings: list[Sighting] = field(default_factory=list)
    """Of the last attempt."""
    earlier: list[Sighting] = field(default_factory=list)
    starts: Mapping[int, int] = field(default_factory=dict)
    """By source, the line that the last attempt begins on."""
    old: frozenset[int] = frozenset()
    """Sources of earlier attempts."""

    def facts(self, name: str) -> list[Sighting]:
        return self._facts.get(name, [])

    @cached_property
    def _facts(self) -> Mapping[str, list[Sighting]]:
        found: dict[str, list[Sighting]] = defaultdict(list)
        for each in self.sightings:
            if each.rule.signature.fact:
                found[each.rule.signature.fact].append(each)
        return found

    @cached_property
    def ticks(self) -> list[Tick]:
        """Of the last attempt."""
        return [tick for reading in self.readings if reading.source not in self.old for tick in reading.ticks
                if tick.line >= self.starts.get(reading.source, 0)]  # fmt: skip

    def ticks_of(self, source: int) -> list[Tick]:
        """Counters in one file."""
        return next((reading.ticks for reading in self.readings if reading.source == source), [])

    @cached_property
    def _steps_after(self) -> Mapping[int, Mapping[int | None, tuple[list[int], list[int]]]]:
        """By source and rank, the lines with a counter, and how many different ones stand on each and after it."""
        return {reading.source: _counted(reading.ticks) for reading in self.readings if reading.source not in self.old}

    def current(self, source: int, line: int) -> bool:
        """Whether a line belongs to the last attempt."""
        return source not in self.old and line >= self.starts.get(source, 0)

    def survived(self, seen: Sighting) -> bool:
        """The same file shows steps made after it, by the same rank where ranks are known."""
        return self._went_on(seen.source, seen.who.rank, seen.line)

    def _went_on(self, source: int, rank: int | None, line: int) -> bool:
        counted = self._steps_after.get(source)
        if counted is None:
            return False
        for each in (rank, _ANYBODY):
            lines, left = counted.get(each, ((), ()))
            at = bisect_right(lines, line)
            if at < len(lines):
                return left[at] > _SURVIVED_STEPS
        return False

    @cached_property
    def tracebacks(self) -> list[tuple[Who, float | None, Traceback, Reading]]:
        """Of the last attempt, those after which nobody went on."""
        return [
            (who.over(reading.who), when, traceback, reading)
            for reading in self.readings for who, when, traceback in reading.tracebacks
            if self.current(reading.source, traceback.number)
            and not self._went_on(reading.source, who.rank, traceback.number)
        ]  # fmt: skip

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All that are known."""
        found = {who.rank for reading in self.readings for who in reading.speakers}
        found |= {reading.who.rank for reading in self.readings}
        found |= {tick.who.rank for tick in self.ticks}
        found |= {each.who.rank for each in self.sightings}
        said = [*self.facts("world"), *self.facts("placed")]
        size = max((int(each.fields["size"]) for each in said if "size" in each.fields), default=0)
        if size <= _MOST_RANKS:
            found |= set(range(size))
        return frozenset(each for each in found if each is not None)

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """By rank."""
        found: dict[int, str] = {}
        for each in self.facts("placed") + self.facts("exit"):
            if each.fields.get("rank") and each.fields.get("host"):
                found.setdefault(int(each.fields["rank"]), each.fields["host"])
        for each in self.sightings:
            if each.who.rank is not None and each.who.host:
                found.setdefault(each.who.rank, each.who.host)
        return found

    @cached_property
    def nodes(self) -> frozenset[str]:
        """Hosts that take part. Ray names the host of a line only where it is not the driver's."""
        speakers = [who for reading in self.readings for who in (*reading.speakers, reading.who)]
        found = {who.host for who in speakers if who.host} | set(self.hosts.values())
        found = {min(each, self.alias(each)) for each in found}
        remote = any(who.host and who.role for who in speakers)
        return frozenset(found | ({"the driver's"} if remote and len(found) == 1 else set()))

    @cached_property
    def foreign(self) -> list[Sighting]:
        """Connections that were tried to addresses of networks in which no host is known to be."""
        speakers = [who for reading in self.readings for who in reading.speakers]
        known = {_network(who.host) for who in speakers if _ADDRESS.fullmatch(who.host)}
        tried = [each for each in self.facts("connect") if each.fields.get("address")]
        return [each for each in tried if known and _network(each.fields["address"]) not in known]

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Host names by address and addresses by name, where a line has both."""
        found: dict[str, str] = {}
        for each in self.facts("named"):
            host, address = each.fields.get("host") or each.who.host, each.fields.get("address", "")
            if host and address and host != address:
                found.setdefault(host, address)
                found.setdefault(address, host)
        return found

    def alias(self, host: str) -> str:
        """The other name of a host, or the same where none is known."""
        return self._names.get(host, host)

    @cached_property
    def places(self) -> Mapping[int, str]:
        """By rank, the line of the user's code that its first traceback ended in."""
        found: dict[int, str] = {}
        for who, _, traceback, _ in self.tracebacks:
            if who.rank is not None:
                found.setdefault(who.rank, traceback.where)
        return found

    @cached_property
    def rank_of_pid(self) -> Mapping[int, int]:
        return {int(each.fields["pid"]): int(each.fields["rank"]) for each in self.facts("placed") + self.facts("exit")
                if each.fields.get("pid") and each.fields.get("rank")}  # fmt: skip

    def rank(self, seen: Sighting) -> int | None:
        """Who a sighting is about: the rank that it names, that says it, or whose process it is."""
        if seen.fields.get("rank", "").isdigit():
            return int(seen.fields["rank"])
        if seen.who.rank is not None:
            return seen.who.rank
        pid = seen.fields.get("pid") or seen.who.pid
        return self.rank_of_pid.get(int(pid)) if pid is not None and str(pid).isdigit() else None

    def said_by(self, seen: Sighting) -> int | None:
        """Who says it: what follows `Rank` in the middle of a line of c10d counts in its group, not in the job."""
        return seen.who.rank if seen.who.rank is not None else self.rank(seen)

    @cached_property
    def timeouts(self) -> list[Timeout]:
        found = []
        for each in self.facts("collective_timeout"):
            said = each.fields
            numbers = {key: float(said[key]) if said.get(key) else None for key in ("ran_ms", "timeout_ms")}
            found.append(Timeout(
                Who(self.said_by(each), each.who.host, each.who.role, each.who.pid), said.get("op", "").lower(),
                int(said["seq"]) if said.get("seq") else None, _elements(said),
                numbers["ran_ms"], numbers["timeout_ms"], each))  # fmt: skip
        return found

    @cached_property
    def failures(self) -> list[Sighting]:
        """What ends processes, in time."""
        names = ("collective_timeout", "peer_lost", "exit", "crash", "cancelled")
        return sorted((each for name in names for each in self.facts(name)), key=order)

    @cached_property
    def ended_well(self) -> bool:
        """It says so, and nobody failed after that."""
        done = [each for each in self.facts("done") if not self.survived(each)]
        if not done:
            return False
        bad = [each for each in self.failures + self.exceptions if self._ends(each)]
        if any(order(each) > order(done[0]) or each.source != done[0].source for each in bad):
            return False
        return not any(reading.source == done[0].source and traceback.number < done[0].line
                       for _, _, traceback, reading in self.tracebacks)  # fmt: skip

    def _ends(self, seen: Sighting) -> bool:
        return seen.rule.signature.fact != "peer_lost" and _exit_code(seen) != 0 and not self.survived(seen)

    @cached_property
    def ends_badly(self) -> bool:
        """The last words of some file, after its last counter, are those of trouble, whatever trouble."""
        for reading in self.readings:
            lines = sorted((said for of_rank in reading.said.values() for said in of_rank), key=lambda said: said.line)
            after = max((tick.line for tick in reading.ticks), default=0)
            last = [said.text for said in lines[-_LAST:] if said.line > after]
            if reading.source not in self.old and any(_TROUBLE.search(each) for each in last):
                return True
        return False

    @cached_property
    def exceptions(self) -> list[Sighting]:
        return [each for each in self.sightings if each.traceback is not None]

    @cached_property
    def traits(self) -> frozenset[str]:
        """Which of `TRAITS` hold."""
        found = set()
        timeouts = self.timeouts
        if self.ended_well:
            found.add("ended_well")
        if len({(tick.epoch, tick.step) for tick in self.ticks}) > 1:
            found.add("progressed")
        if all(self.survived(each) for each in self.failures) and not self.tracebacks:
            found.add("running")
        if timeouts:
            found.add("collective_timeout")
            if all(each.numel == 1 for each in timeouts if each.numel is not None) and any(
                each.numel is not None for each in timeouts
            ):
                found.add("scalar")
        states = self.facts("work_state")
        if any(int(each.fields["completed"]) <= 0 for each in states) or any(each.seq == 1 for each in timeouts):
            found.add("first_collective")
        said = {each.who.rank for each in timeouts}
        if timeouts and len(self.ranks - said) and said - {None}:
            found.add("silent_ranks")
        for name, fact in (("peer_lost", "peer_lost"), ("mismatch", "mismatch"), ("crashed", "crash")):
            if self.facts(fact):
                found.add(name)
        if any(_exit_code(each) for each in self.facts("exit")):
            found.add("crashed")
        if self.tracebacks:
            found.add("exception")
        if len(self.ranks) <= 1:
            found.add("one_rank")
        if len(self.nodes) > 1:
            found.add("many_hosts")
        if self.foreign:
            found.add("foreign_address")
        saves, done = self.facts("checkpoint"), self.facts("checkpoint_done")
        if saves and (not done or order(saves[-1]) > order(done[-1])):
            found.add("saving")
        return frozenset(found)


_ANYBODY = -1


def _counted(ticks: Sequence[Tick]) -> dict[int | None, tuple[list[int], list[int]]]:
    of_rank: dict[int | None, list[Tick]] = defaultdict(list)
    for tick in ticks:
        of_rank[_ANYBODY].append(tick)
        of_rank[tick.who.rank].append(tick)
    found = {}
    for rank, own in of_rank.items():
        seen: set[tuple[int, int]] = set()
        left = []
        for tick in reversed(own):
            seen.add((tick.epoch, tick.step))
            left.append(len(seen))
        found[rank] = [tick.line for tick in own], left[::-1]
    return found


def order(seen: Sighting) -> tuple[float, int, int]:
    """By time; what has none stands last among the sources, in the order of lines."""
    return seen.when if seen.when is not None else float("inf"), seen.source, seen.line


def _elements(said: Mapping[str, str]) -> int | None:
    if said.get("numel"):
        return int(said["numel"])
    sizes = re.findall(r"\d+", said.get("shape", ""))
    return prod(map(int, sizes)) if sizes else None


def _network(address: str) -> str:
    """Its first two numbers: hosts of one cluster are rarely in several such networks, and then on purpose."""
    return ".".join(address.split(".")[:2])


def _exit_code(seen: Sighting) -> int | None:
    code = seen.fields.get("code")
    return int(code) if code is not None else None


def tell(readings: Sequence[Reading]) -> Story:
    """The story of all that was read."""
    old = old_sources(readings)
    starts = {each.source: last_start(each) for each in readings if each.source not in old}
    story = Story(readings, starts=starts, old=old)
    hosts = {who.host for reading in readings if reading.source not in old for who in reading.speakers if who.host}
    for reading in readings:
        for each in reading.sightings:
            lasts = each.rule.cls in _LASTING and (not each.who.host or each.who.host in hosts)
            current = story.current(each.source, each.line) or lasts
            (story.sightings if current else story.earlier).append(each)
    story.sightings.sort(key=order)
    return story


def steps_by_rank(ticks: Iterable[Tick]) -> Mapping[int, Tick]:
    """By rank the last counter that it showed."""
    found: dict[int, Tick] = {}
    for tick in ticks:
        if tick.who.rank is not None:
            found[tick.who.rank] = tick
    return found
