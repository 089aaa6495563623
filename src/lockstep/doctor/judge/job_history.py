"""The history of a job from all its logs: attempts, ranks, progress, and how each rank ended.

Nothing here knows failure classes; rules and scoring ask for traits.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from lockstep.doctor.logs import attempts, line_origin
from lockstep.doctor.logs.attempts import earlier_attempts, last_attempt_start
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.parsed_log import ParsedLog, ProgressTick, RuleMatch
from lockstep.doctor.logs.rank_resolver import ranks_by_pid
from lockstep.doctor.logs.stack_traces import TRACEBACK_START, Traceback, is_primary
from lockstep.doctor.logs.step_progress import StepHistory
from lockstep.doctor.logs.timestamps import TimestampParser

PERSISTENT_CLASSES = ("gpu_hardware_fault",)
"""Classes that the next attempt has too when it gets the same hosts."""
_TAIL_LINES = 4
_TROUBLE_WORDS = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|[A-Z]\w*Error|failed|Killed|killed|[Aa]borted|crashed|OOM|out of memory|marked dead)\b"
    r"|^\[[^\]]{10,40} [EF] \d+ \d+\]|\berror:"
)
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_MAX_RANKS = 100_000
_EXCEPTION_LINE = re.compile(r"\s*(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_SURE_STRENGTH = 0.7
"""Strength from which on a cause ends a job, whatever it said before."""
_RANKS_PER_HOST = 8
"""Ranks that one host has: of more, several hosts may take part of which no line tells."""


@dataclass(frozen=True, slots=True)
class CollectiveTimeout:
    """A rank waited in a collective until its time-out."""

    who: LineOrigin
    operation: str
    seq: int | None
    numel: int | None
    ran_ms: float | None
    timeout_ms: float | None
    group: str
    """The number of its process group, where that is said."""
    sighting: RuleMatch


@dataclass
class JobHistory:
    """All sightings in the order of time, of the last attempt and of earlier ones."""

    readings: Sequence[ParsedLog]
    sightings: list[RuleMatch] = field(default_factory=list)
    """Of the last attempt."""
    earlier: list[RuleMatch] = field(default_factory=list)
    starts: Mapping[int, int] = field(default_factory=dict)
    """By source, the line that the last attempt begins on."""
    old: frozenset[int] = frozenset()
    """Sources of earlier attempts."""

    def facts(self, name: str) -> list[RuleMatch]:
        return self._facts.get(name, [])

    @cached_property
    def _facts(self) -> Mapping[str, list[RuleMatch]]:
        found: dict[str, list[RuleMatch]] = defaultdict(list)
        for each in self.sightings:
            if each.rule.signature.fact:
                found[each.rule.signature.fact].append(each)
        return found

    @cached_property
    def ticks(self) -> list[ProgressTick]:
        """Of the last attempt."""
        return [tick for reading in self.readings if reading.source not in self.old for tick in reading.ticks
                if tick.line >= self.starts.get(reading.source, 0)]  # fmt: skip

    def ticks_of(self, source: int) -> list[ProgressTick]:
        """Counters in one file."""
        return self.by_source[source].ticks if source in self.by_source else []

    @cached_property
    def steps(self) -> StepHistory:
        """After each line of each file."""
        return StepHistory(self.readings, self.old)

    @cached_property
    def by_source(self) -> Mapping[int, ParsedLog]:
        return {each.source: each for each in self.readings}

    def current(self, source: int, line: int) -> bool:
        """Whether a line belongs to the last attempt."""
        return source not in self.old and line >= self.starts.get(source, 0)

    def survived(self, seen: RuleMatch) -> bool:
        """The same file shows steps made after it, by the same rank where ranks are known; what nobody survives, only
        steps of the very rank that says it, or so many that nobody can be missing."""
        return self.steps.went_on(seen.source, seen.who.rank, seen.line, lethal=seen.rule.signature.fatal is True)

    @cached_property
    def period(self) -> attempts.TimeSpan:
        """When the last attempt ran."""
        return attempts.job_time_span(self.readings, self.old, self.starts)

    def strayed(self, seen: RuleMatch) -> float:
        """Seconds that a record beside the job's logs is dated before or after the job; 0 within, or where unknown."""
        return attempts.seconds_outside_job(seen, self.by_source[seen.source], self.period)

    @cached_property
    def tracebacks(self) -> list[tuple[LineOrigin, float | None, Traceback, ParsedLog]]:
        """Of the last attempt, those after which nobody went on."""
        return [
            (who.over(reading.who), when, traceback, reading)
            for reading in self.readings for who, when, traceback in reading.tracebacks
            if self.current(reading.source, traceback.number)
            and not self.steps.went_on(reading.source, who.rank, traceback.number)
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
        if size <= _MAX_RANKS:
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
    def foreign(self) -> list[RuleMatch]:
        """Connections that were tried to addresses of networks in which no host is known to be."""
        speakers = [who for reading in self.readings for who in reading.speakers]
        known = {_network_prefix(who.host) for who in speakers if _ADDRESS.fullmatch(who.host)}
        tried = [each for each in self.facts("connect") if each.fields.get("address")]
        return [each for each in tried if known and _network_prefix(each.fields["address"]) not in known]

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
        said = [each.fields for each in self.facts("placed") + self.facts("exit")]
        speakers = [who for reading in self.readings for who in reading.speakers] + [
            each.who for each in self.sightings
        ]
        return ranks_by_pid(said, speakers, one_host=len(self.nodes) <= 1 and len(self.ranks) <= _RANKS_PER_HOST)

    def rank(self, seen: RuleMatch) -> int | None:
        """Who a sighting is about: the rank that it names, that says it, or whose process it is."""
        if seen.fields.get("rank", "").isdigit():
            return int(seen.fields["rank"])
        if seen.who.rank is not None:
            return seen.who.rank
        pid = seen.fields.get("pid") or seen.who.pid
        return self.rank_of_pid.get(int(pid)) if pid is not None and str(pid).isdigit() else None

    def said_by(self, seen: RuleMatch) -> int | None:
        """Who says it: what follows `SelfTestRank` in the middle of a line of c10d counts in its group, not in the
        job."""
        return seen.who.rank if seen.who.rank is not None else self.rank(seen)

    @cached_property
    def timeouts(self) -> list[CollectiveTimeout]:
        found = []
        for each in self.facts("collective_timeout"):
            said = each.fields
            numbers = {key: float(said[key]) if said.get(key) else None for key in ("ran_ms", "timeout_ms")}
            found.append(CollectiveTimeout(
                LineOrigin(self.said_by(each), each.who.host, each.who.role, each.who.pid), said.get("op", "").lower(),
                int(said["seq"]) if said.get("seq") else None, _element_count(said),
                numbers["ran_ms"], numbers["timeout_ms"], said.get("pg", ""), each))  # fmt: skip
        return found

    @cached_property
    def failures(self) -> list[RuleMatch]:
        """What ends processes, in time."""
        names = ("collective_timeout", "peer_lost", "exit", "crash", "cancelled")
        return sorted((each for name in names for each in self.facts(name)), key=match_order)

    def _first_collective(self) -> bool:
        """By the number of what timed out, else by what the ranks say of that group; of others one may be idle."""
        numbers = [each.seq for each in self.timeouts if each.seq is not None]
        if numbers:
            return max(numbers) <= 1
        groups = {each.group for each in self.timeouts if each.group}
        states = self.facts("work_state")
        states = [each for each in states if each.fields.get("pg") in groups] or states
        return bool(states) and all(int(each.fields["completed"]) <= 0 for each in states)

    @cached_property
    def ended_well(self) -> bool:
        """It says so, nothing went wrong after that, and what had gone wrong before did not keep it from going on."""
        done = [each for each in self.facts("done") if not (self.survived(each) or self._part(each))]
        if not done:
            return False
        first, last = done[0], {each.source: each.line for each in sorted(done, key=lambda each: each.line)}
        bad = [(each.source, each.who.rank, each.line) for each in self.failures + self.exceptions if self._ends(each)
               and not (_cleans_up(each, last) or _was_handled(each.traceback, each, first))]  # fmt: skip
        bad += [(at.source, None, each.number) for _, _, each, at in self.tracebacks
                if is_primary(each) and not _was_handled(each, at, first)]  # fmt: skip
        if any(each[0] != first.source or not self._stepped(*each, first.line) for each in bad):
            return False
        later = (each for each in self.sightings if each.line > last.get(each.source, each.line))
        return not any(self._lethal(each) for each in later) and not any(
            self._raises_after(*each) for each in last.items()
        )

    def _part(self, done: RuleMatch) -> bool:
        """Only an evaluation or a test has ended: a counter before it had not come to its end."""
        before = [tick for tick in self.ticks_of(done.source) if tick.line < done.line]
        return "part" in done.fields and bool(before) and before[-1].step + 1 < before[-1].of

    def _stepped(self, source: int, rank: int | None, line: int, until: int) -> bool:
        """A step was made between two lines."""
        return any(line < tick.line <= until and (rank is None or tick.who.rank in (None, rank))
                   for tick in self.ticks_of(source))  # fmt: skip

    def _lethal(self, seen: RuleMatch) -> bool:
        signature = seen.rule.signature
        sure = signature.role == "cause" and signature.strength >= _SURE_STRENGTH and signature.fatal is not False
        return sure and not signature.needs and not self.survived(seen)

    def _raises_after(self, source: int, line: int) -> bool:
        """The last words of a file name an exception; those with a traceback have rules of their own."""
        said = [each.text for of_rank in self.by_source[source].said.values() for each in of_rank if each.line > line]
        return not any(TRACEBACK_START in each for each in said) and any(
            _EXCEPTION_LINE.match(each, line_origin.parse_prefixes(each, TimestampParser()).at) for each in said
        )

    def _ends(self, seen: RuleMatch) -> bool:
        return seen.rule.signature.fact != "peer_lost" and _exit_code(seen) != 0 and not self.survived(seen)

    @cached_property
    def ends_badly(self) -> bool:
        """The last words of some file, after its last counter, are those of trouble, whatever trouble."""
        for reading in self.readings:
            lines = sorted((said for of_rank in reading.said.values() for said in of_rank), key=lambda said: said.line)
            after = max((tick.line for tick in reading.ticks), default=0)
            last = [said.text for said in lines[-_TAIL_LINES:] if said.line > after]
            if reading.source not in self.old and any(_TROUBLE_WORDS.search(each) for each in last):
                return True
        return False

    @cached_property
    def exceptions(self) -> list[RuleMatch]:
        return [each for each in self.sightings if each.traceback is not None]

    @cached_property
    def traits(self) -> frozenset[str]:
        """Which of `JOB_TRAITS` hold."""
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
        if self._first_collective():
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
        hosts = {"one_rank": len(self.ranks) <= 1, "many_hosts": len(self.nodes) > 1, "foreign_address": self.foreign}
        found |= {name for name, holds in hosts.items() if holds}
        saves, done = self.facts("checkpoint"), self.facts("checkpoint_done")
        if saves and (not done or match_order(saves[-1]) > match_order(done[-1])):
            found.add("saving")
        return frozenset(found)


def match_order(seen: RuleMatch) -> tuple[float, int, int]:
    """By time; what has none stands last among the sources, in the order of lines."""
    return seen.when if seen.when is not None else float("inf"), seen.source, seen.line


def _element_count(said: Mapping[str, str]) -> int | None:
    if said.get("numel"):
        return int(said["numel"])
    sizes = re.findall(r"\d+", said.get("shape", ""))
    return prod(map(int, sizes)) if sizes else None


def _network_prefix(address: str) -> str:
    """Its first two numbers: hosts of one cluster are rarely in several such networks, and then on purpose."""
    return ".".join(address.split(".")[:2])


def _was_handled(found: Traceback | None, at: RuleMatch | ParsedLog, done: RuleMatch) -> bool:
    """Of an exception one line was printed, and then the job came to its end."""
    return found is not None and found.alone and at.source == done.source and found.number < done.line


def _cleans_up(seen: RuleMatch, done: Mapping[int, int]) -> bool:
    """Before the last word of success a launcher ends a process of its own."""
    return seen.rule.signature.fact == "cancelled" and "signal" in seen.fields and seen.line < done.get(seen.source, 0)


def _exit_code(seen: RuleMatch) -> int | None:
    code = seen.fields.get("code")
    return int(code) if code is not None else None


def build_history(readings: Sequence[ParsedLog]) -> JobHistory:
    """The story of all that was read."""
    old = earlier_attempts(readings)
    starts = {each.source: last_attempt_start(each) for each in readings if each.source not in old}
    story = JobHistory(readings, starts=starts, old=old)
    hosts = {who.host for reading in readings if reading.source not in old for who in reading.speakers if who.host}
    for reading in readings:
        for each in reading.sightings:
            lasts = each.rule.cls in PERSISTENT_CLASSES and (not each.who.host or each.who.host in hosts)
            current = lasts or (story.current(each.source, each.line) and story.strayed(each) < attempts.TIME_ZONES_S)
            (story.sightings if current else story.earlier).append(each)
    story.sightings.sort(key=match_order)
    return story
