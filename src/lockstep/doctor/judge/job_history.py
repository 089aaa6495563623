"""The history of a job, from all its logs: attempts, ranks, progress, and how each rank ended.

Rules and scoring use properties of the job that are derived here, the traits of `knowledge_schema.JOB_TRAITS`.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import PurePosixPath

from lockstep.doctor.judge import job_end
from lockstep.doctor.logs import attempts, process_names
from lockstep.doctor.logs.attempts import earlier_attempts, last_attempt_start
from lockstep.doctor.logs.line_origin import PLACING_FACTS, LineOrigin, ranks_by_pid
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch, StepCounter
from lockstep.doctor.logs.stack_traces import Traceback, is_graceful
from lockstep.doctor.logs.step_progress import StepHistory

PERSISTENT_CLASSES = ("gpu_hardware_fault",)
"""Failure classes that persist in the next attempt on the same hosts."""
_ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
MAX_RANKS = 100_000
"""A line that says that a job has more is not believed."""
_RANKS_PER_HOST = 8
"""With more ranks, several hosts may take part even if no line names them."""


@dataclass(frozen=True, slots=True)
class CollectiveTimeout:
    """A timeout of a collective, as one rank reported it."""

    rank: int | None
    match: RuleMatch

    @property
    def operation(self) -> str:
        return self.match.fields.get("op", "").lower()

    @property
    def seq(self) -> int | None:
        return int(self.match.fields["seq"]) if self.match.fields.get("seq") else None

    @property
    def numel(self) -> int | None:
        return _element_count(self.match.fields)

    @property
    def ran_ms(self) -> float | None:
        """How long the collective ran, or else its timeout; None if the line says neither."""
        known = self.match.fields.get("ran_ms") or self.match.fields.get("timeout_ms")
        return float(known) if known else None


@dataclass
class JobHistory:
    """All matches in time order, of the last attempt and of earlier ones."""

    logs: Sequence[ParsedLog]
    matches: list[RuleMatch] = field(default_factory=list)
    """Matches of the last attempt."""
    earlier: list[RuleMatch] = field(default_factory=list)
    starts: Mapping[int, int] = field(default_factory=dict)
    """The line on which the last attempt begins, by source."""
    old_sources: frozenset[int] = frozenset()
    """Sources of earlier attempts."""

    def facts(self, name: str) -> list[RuleMatch]:
        """Returns the matches, in the last attempt, of the rules that state the fact `name` (see `facts.yaml`)."""
        return self._facts.get(name, [])

    @cached_property
    def _facts(self) -> Mapping[str, list[RuleMatch]]:
        found: dict[str, list[RuleMatch]] = defaultdict(list)
        for each in self.matches:
            if each.rule.signature.fact:
                found[each.rule.signature.fact].append(each)
        return found

    @cached_property
    def failed_parties(self) -> Mapping[tuple[int, int], list[RuleMatch]]:
        """What lines call failed, by their places."""
        found: dict[tuple[int, int], list[RuleMatch]] = defaultdict(list)
        for each in self.facts("party_failed"):
            found[each.place].append(each)
        return found

    @cached_property
    def counters(self) -> list[StepCounter]:
        """The progress counters of the last attempt."""
        return [counter for log in self.logs if log.source not in self.old_sources for counter in log.counters
                if counter.line >= self.starts.get(log.source, 0)]  # fmt: skip

    def counters_of(self, source: int) -> list[StepCounter]:
        """The progress counters of one file."""
        return self.by_source[source].counters if source in self.by_source else []

    @cached_property
    def steps(self) -> StepHistory:
        """Training progress by file and line: tells whether steps follow a line."""
        return StepHistory(self.logs, self.old_sources)

    @cached_property
    def by_source(self) -> Mapping[int, ParsedLog]:
        return {each.source: each for each in self.logs}

    def in_last_attempt(self, source: int, line: int) -> bool:
        """Whether a line belongs to the last attempt."""
        return source not in self.old_sources and line >= self.starts.get(source, 0)

    def continued_after(self, match: RuleMatch) -> bool:
        """Whether training continued after the line: the same file shows later steps, of the same rank if it is known.

        After a fatal line, steps of other ranks count only if there are at least `MANY_STEPS` of them: with a rank
        missing, the others would stop earlier.
        """
        return self.steps.continued_after(
            match.source, match.origin.rank, match.line, fatal=match.rule.signature.fatal is True
        )

    @cached_property
    def period(self) -> attempts.TimeSpan:
        """The time span of the last attempt."""
        return attempts.job_time_span(self.logs, self.old_sources, self.starts)

    def outside_job(self, match: RuleMatch) -> float:
        """Returns the seconds by which a line of a kernel log or other host log lies before or after the job; 0 if
        the line is inside, or if the times are unknown."""
        return attempts.seconds_outside_job(match, self.by_source[match.source], self.period)

    @cached_property
    def tracebacks(self) -> list[tuple[LineOrigin, float | None, Traceback, ParsedLog]]:
        """The last attempt's tracebacks after which the rank made no more steps and reported no completion."""
        return [
            (self._raiser(origin.with_defaults(log.origin), traceback), when, traceback, log)
            for log in self.logs for origin, when, traceback in log.tracebacks
            if self.in_last_attempt(log.source, traceback.number)
            and not is_graceful(traceback)
            # What workers print after a driver printed the exception of one of them was on its way.
            and not self.steps.continued_after(
                log.source, origin.rank, traceback.number, fatal=traceback.pid is not None
            )
            and not job_end.completed_after(self, origin.with_defaults(log.origin).rank, log.source, traceback.number)
        ]  # fmt: skip

    def _raiser(self, origin: LineOrigin, found: Traceback) -> LineOrigin:
        """Returns the origin of an exception: of one that a driver prints, the process that raised it."""
        if found.pid is None or origin.rank is not None:
            return origin
        return LineOrigin(self.rank_of_pid.get(found.pid), found.ip, origin.role, found.pid)

    @cached_property
    def raisers(self) -> Mapping[tuple[int, int], LineOrigin]:
        """Who raised an exception, by the place of its last line; a driver prints those of others too."""
        return {(log.source, each.number): origin for origin, _, each, log in self.tracebacks}

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All known ranks: also those that only a launcher's table or the number of a higher rank shows."""
        found = {origin.rank for log in self.logs for origin in log.origins}
        found |= {log.origin.rank for log in self.logs}
        found |= {counter.origin.rank for counter in self.counters}
        found |= {each.origin.rank for each in self.matches}
        reports = [*self.facts("world"), *self.facts("placed")]
        reported = {int(each.fields["rank"]) for each in self.facts("exit") if each.fields.get("rank", "").isdigit()}
        sizes = [int(each.fields["size"]) for each in reports if "size" in each.fields]
        sizes += [each + 1 for each in found | reported if each is not None]
        return frozenset(range(max((each for each in sizes if each <= MAX_RANKS), default=0)))

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank."""
        found: dict[int, str] = {}
        for each in self.facts("placed") + self.facts("exit"):
            if each.fields.get("rank") and each.fields.get("host"):
                found.setdefault(int(each.fields["rank"]), each.fields["host"])
        for each in self.matches:
            if each.origin.rank is not None and each.origin.host:
                found.setdefault(each.origin.rank, each.origin.host)
        return found

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The hosts that take part. Ray omits the host of a line that comes from the driver's host, so that host is
        added under a placeholder."""
        origins = [origin for log in self.logs for origin in (*log.origins, log.origin)]
        found = {origin.host for origin in origins if origin.host} | set(self.hosts.values())
        found = {min(each, self.alias(each)) for each in found}  # count a host once if its name and address are known
        has_remote_actors = any(origin.host and origin.role for origin in origins)
        return frozenset(found | ({"<driver host>"} if has_remote_actors and len(found) == 1 else set()))

    @cached_property
    def foreign_connections(self) -> list[RuleMatch]:
        """The attempted connections to addresses in networks without a known host."""
        origins = [origin for log in self.logs for origin in log.origins]
        known = {_network_prefix(origin.host) for origin in origins if _ADDRESS.fullmatch(origin.host)}
        attempted = [each for each in self.facts("connect") if each.fields.get("address")]
        return [each for each in attempted if known and _network_prefix(each.fields["address"]) not in known]

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Host names by address and addresses by name, from lines that have both."""
        found: dict[str, str] = {}
        for each in self.facts("named"):
            host, address = each.fields.get("host") or each.origin.host, each.fields.get("address", "")
            if host and address and host != address:
                found.setdefault(host, address)
                found.setdefault(address, host)
        return found

    def alias(self, host: str) -> str:
        """Returns the address of a host name or the name of an address; the given one if no other is known."""
        return self._names.get(host, host)

    @cached_property
    def exception_sites(self) -> Mapping[int, str]:
        """The line of user code where the first traceback of each rank ended."""
        found: dict[int, str] = {}
        for origin, _, traceback, _ in self.tracebacks:
            if origin.rank is not None:
                found.setdefault(origin.rank, traceback.where)
        return found

    @cached_property
    def rank_of_pid(self) -> Mapping[int, int]:
        reports = [(each.origin, each.fields) for name in PLACING_FACTS for each in self.facts(name)]
        origins = [origin for log in self.logs for origin in log.origins] + [each.origin for each in self.matches]
        return ranks_by_pid(reports, origins, one_host=len(self.nodes) <= 1 and len(self.ranks) <= _RANKS_PER_HOST)

    @cached_property
    def log_of_pid(self) -> Mapping[int, str]:
        """The host of the file to which a process wrote, or the name of the file if it is of no known host; only if the
        files of a job differ in their processes."""
        files: dict[int, set[str]] = defaultdict(set)
        for log in self.logs:
            name = log.origin.host or PurePosixPath(log.name).stem
            for origin in log.origins:
                if origin.pid is not None:
                    files[origin.pid].add(name)
        return {pid: min(names) for pid, names in files.items() if len(names) == 1 and len(self.logs) > 1}

    def rank(self, match: RuleMatch) -> int | None:
        """Returns the rank that a match is about: the rank that the line names, that wrote it, or that has its pid."""
        named = match.fields.get("rank") or match.fields.get("task") or ""
        if named.isdigit():
            return int(named)
        if match.rule.signature.fact == "exit" and "party" in match.fields:
            process = process_names.PARTY.fullmatch(match.fields["party"])
            return int(process["label"] or process["instance"]) if process else None
        if match.origin.rank is not None:
            return match.origin.rank
        pid = match.fields.get("pid") or match.origin.pid
        rank = self.rank_of_pid.get(int(pid)) if pid is not None and str(pid).isdigit() else None
        if rank is None and match.rule.signature.fact == "exit" and "task" not in match.fields:
            on_host = [each for each, host in self.hosts.items() if host == match.fields.get("host")]
            rank = on_host[0] if len(on_host) == 1 else None
        return rank

    def reporting_rank(self, match: RuleMatch) -> int | None:
        """Returns the rank that reports a match. `Rank` in the middle of a c10d line is the rank within the process
        group, not the global rank."""
        return match.origin.rank if match.origin.rank is not None else self.rank(match)

    @cached_property
    def timeouts(self) -> list[CollectiveTimeout]:
        """The timeouts of collectives that ranks reported in the last attempt."""
        return [CollectiveTimeout(self.reporting_rank(each), each) for each in self.facts("collective_timeout")]

    @cached_property
    def failures(self) -> list[RuleMatch]:
        """The matches that report the end of a process or of a wait, in time order."""
        names = ("collective_timeout", "peer_lost", "exit", "crash", "cancelled")
        found = (each for name in names for each in self.facts(name)
                 if job_end.exit_code(each) != 0 and "party" not in each.fields)  # fmt: skip
        return sorted(found, key=match_order)

    def _first_collective(self) -> bool:
        """Whether the first collective of a process group timed out, according to its sequence number or to the
        reported state of the group."""
        numbers = [each.seq for each in self.timeouts if each.seq is not None]
        if numbers:
            return max(numbers) <= 1
        groups = {each.match.fields.get("pg") for each in self.timeouts} - {None, ""}
        states = self.facts("work_state")
        states = [each for each in states if each.fields.get("pg") in groups] or states
        return bool(states) and all(int(each.fields["completed"]) <= 0 for each in states)

    @cached_property
    def ended_well(self) -> bool:
        """Whether the job reports success, nothing failed later, and earlier failures did not stop it."""
        return job_end.ended_well(self)

    @cached_property
    def closing_lines(self) -> Mapping[int, int]:
        """The line of each file, by source, that reports the completion of the work at its end."""
        return job_end.closing_lines(self)

    @cached_property
    def closing_lines_of_ranks(self) -> Mapping[int, Mapping[int, int]]:
        """The line of each file and rank that reports the completion of the rank's work at its end; 0 if none does."""
        return job_end.closing_lines_of_ranks(self)

    @cached_property
    def ends_with_trouble(self) -> bool:
        """Whether the last lines of some file, after its last counter or report of completion, report an error, or the
        last one says that the program waits."""
        return job_end.ends_with_trouble(self)

    @cached_property
    def exceptions(self) -> list[RuleMatch]:
        """The matches of rules for exceptions."""
        return [each for each in self.matches if each.traceback is not None]

    @cached_property
    def traits(self) -> frozenset[str]:
        """The traits of `JOB_TRAITS` that the job has."""
        found = set()
        if self.ended_well:
            found.add("ended_well")
        if len({(counter.epoch, counter.step) for counter in self.counters}) > 1 or job_end.closes(self):
            found.add("progressed")
        if all(self.continued_after(each) for each in self.failures) and not self.tracebacks:
            found.add("running")
        if self.timeouts:
            found.add("collective_timeout")
        if self._first_collective():
            found.add("first_collective")
        for name, fact in (("peer_lost", "peer_lost"), ("crashed", "crash")):
            if self.facts(fact):
                found.add(name)
        if any(job_end.exit_code(each) for each in self.facts("exit")):
            found.add("crashed")
        if self.tracebacks:
            found.add("exception")
        if len(self.nodes) > 1:
            found.add("many_hosts")
        if self.foreign_connections:
            found.add("foreign_address")
        saves, done = self.facts("checkpoint"), self.facts("checkpoint_done")
        if saves and (not done or match_order(saves[-1]) > match_order(done[-1])):
            found.add("saving")
        return frozenset(found)


def match_order(match: RuleMatch) -> tuple[float, int, int]:
    """Sort key by time; matches without a time come last, in order of source and line."""
    return match.when if match.when is not None else float("inf"), match.source, match.line


def _element_count(fields: Mapping[str, str]) -> int | None:
    """Returns the number of elements of a collective; None if the line does not name it."""
    if fields.get("numel"):
        return int(fields["numel"])
    sizes = re.findall(r"\d+", fields.get("shape", ""))
    return prod(map(int, sizes)) if sizes else None


def _network_prefix(address: str) -> str:
    """Returns the first two numbers of an address, which the hosts of a cluster usually share."""
    return ".".join(address.split(".")[:2])


def build_history(logs: Sequence[ParsedLog]) -> JobHistory:
    """Builds the history of a job from all its logs."""
    old = earlier_attempts(logs)
    starts = {each.source: last_attempt_start(each) for each in logs if each.source not in old}
    history = JobHistory(logs, starts=starts, old_sources=old)
    hosts = {origin.host for log in logs if log.source not in old for origin in log.origins if origin.host}
    for log in logs:
        for each in log.matches:
            persists = each.rule.cls in PERSISTENT_CLASSES and (not each.origin.host or each.origin.host in hosts)
            in_last_attempt = persists or (
                history.in_last_attempt(each.source, each.line)
                and history.outside_job(each) < attempts.MAX_CLOCK_OFFSET_S
            )
            (history.matches if in_last_attempt else history.earlier).append(each)
    history.matches.sort(key=match_order)
    return history
