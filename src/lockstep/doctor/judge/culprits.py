"""Finds the culprits of a failure: ranks, hosts, addresses, interfaces, devices or services."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from lockstep.doctor.judge.hypotheses import NO_FAULT, FailureHypothesis
from lockstep.doctor.judge.job_history import MAX_RANKS, JobHistory
from lockstep.doctor.judge.mentioned_parties import mentioned_process, mentioned_service
from lockstep.doctor.knowledge.knowledge_schema import CulpritSelector
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.doctor.logs.stack_traces import is_primary, names_trouble
from lockstep.watch.diagnosis.verdict import Culprit

_TERMINATION_CODES = ("SIGTERM", "Terminated", "-15", "15", "143")
_KILL_CODES = ("SIGKILL", "Killed", "-9", "137", "Out Of Memory")
"""Signals, exit codes, and the state of a Slurm job step that was killed because of its memory."""
_MAX_CULPRITS = 64
_FIRST_FAILURE_CLASSES = frozenset((
    "host_oom", "rank_oom", "cuda_kernel_error", "gpu_hardware_fault", "rank_exception_masked", "shm_too_small",
    "os_limits", "storage_fault", "remote_service_timeout", "nan_or_inf",
    "external_kill", "watchdog_or_heartbeat", "framework_bug", "gpu_binding",
    "rank_divergent_branch", "vllm_weight_sync",
))  # fmt: skip
"""Failure classes in which one process fails first. If no line names that process, the first process that ended with
an error is the culprit."""
_OF_SERVICES = ("remote_service_timeout", "vllm_weight_sync")
"""Failure classes in which a client reports what happened to a service."""
_ADDRESS = r"\d{1,3}(?:\.\d{1,3}){3}"
_PEER = rf"\[?(?:::ffff:)?(?!127\.)({_ADDRESS}|[\da-f]{{1,4}}:[\da-f:]*:[\da-f:]*)"
_MENTIONED_NODE = re.compile(
    rf"\b(?:ip|IP)[=:] ?({_ADDRESS})|\b(?:on|at|of|this) node ({_ADDRESS}|(?=[\w.-]*\d)[A-Za-z][\w.-]+)"
    rf"|[Nn]ode failure on ([\w.-]+)|\baddress: ({_ADDRESS})|\b(?:on|of) host ([\w.-]+)|\bnode:({_ADDRESS})"
    rf"|\b(?:remote=|(?:[Cc]onnect(?:ion|ing)? (?:to|with)|refused by) ){_PEER}"
    rf"|\[([A-Za-z][\w.-]*\d[\w.-]*|(?!127\.){_ADDRESS})\]:\d{{2,5}}\b"
)
"""A node that a line names: the one that it is about, or the other end of a connection."""
_RANK_PREFIX = re.compile(r"(?:^|Error: )\[?[Rr]ank (?P<rank>\d+)(?:[\],:](?! [Rr]ank \d)| exit)")
"""The beginning of a message that names the rank which raised it."""
_RANK_IN_PROSE = re.compile(
    r"(?<![\w-])(?:[Rr]ank|(?P<process>(?<!worker )[Pp]rocess)) (?P<rank>\d{1,5})(?![\w/.]|-\d| of \d)"
    r"(?=$|[,:;.)]| (?:got|is|was|has|had|did|died|failed|raised|terminated|exited|crashed|ran|hit|cannot|could)\b)"
)
"""A rank or spawned process in the text of a message: `on rank 3`, `Rank 3 got`, `process 3 terminated`."""
_MENTIONED_PID = re.compile(r"\bWorker PID[=:] ?(\d+)|\(pid[=:] ?(\d+)")
_JOB_FILE = re.compile(
    r"(?i)(?:job|train\w*|run|driver|main|console|launcher|log|std(?:out|err)|out(?:put)?|err(?:or)?|slurm|ray\w*|gcs\w*"
    r"|worker|python|dmesg|kern(?:el)?|syslog|message|journal(?:ctl)?|kubectl|describe|event|status|nvidia|scontrol|sacct"
    r"|top|ps|env|stack|py-?spy|dump)s?(?:[-_.@\d].*)?"
)
"""Files whose names say no more than that they are of the job, of a host or of a tool that looked at them."""
_DRIVERS = re.compile(
    r"(?i)task_?runner|main_task|driver|entrypoint|raylet|gcs_server|autoscaler|apiserver|engine_?core$"
)
"""Roles that only report the failures of others."""


def likely_first_failures(history: JobHistory) -> Iterator[Culprit]:
    """Yields the ranks or hosts that probably failed first: all killed processes; otherwise the one that the launcher
    reports as the first, or the first one that failed."""
    exits = [match for match in history.facts("exit") if not _is_no_failure_of_its_own(match)]
    killed = [match for match in exits if _signal_or_code(match) in _KILL_CODES]
    first = killed or history.facts("first_failure")[:1] or exits
    first = (
        [each for each in first if not _only_lost_peers(history.rank(each), history)] or _terminated(history) or first
    )
    for match in first if killed else first[:1]:
        rank = history.rank(match)
        if rank is not None:
            yield replace(culprit_of_rank(rank, history), host=history.hosts.get(rank, match.fields.get("host", "")))
        elif match.fields.get("host"):
            yield Culprit(None, host=match.fields["host"], name=match.fields["host"])
        elif match.fields.get("party"):
            pid = match.fields.get("pid", "")
            yield Culprit(None, name=match.fields["party"], pid=int(pid) if pid.isdigit() else None)


def _terminated(history: JobHistory) -> list[RuleMatch]:
    """Returns the first report that SIGTERM ended a process, of those that did not merely lose a peer."""
    return [each for each in history.facts("exit")
            if _signal_or_code(each) in _TERMINATION_CODES and history.rank(each) is not None
            and not _only_lost_peers(history.rank(each), history)][:1]  # fmt: skip


def _only_lost_peers(rank: int | None, history: JobHistory) -> bool:
    """Whether all exceptions of a rank are the ends of waits for others."""
    raised = [each for origin, _, each, _ in history.tracebacks if rank is not None and origin.rank == rank]
    return bool(raised) and not any(map(is_primary, raised))


def ended_by_signal(history: JobHistory) -> bool:
    """Whether a signal that the launcher did not send ended a process."""
    codes = [_signal_or_code(match) for match in history.facts("exit") if not _is_no_failure_of_its_own(match)]
    return any(code.startswith(("-", "SIG")) or code in _KILL_CODES or "limit" in code for code in codes)


def was_terminated(rank: int, history: JobHistory) -> bool:
    """Whether SIGTERM ended a rank."""
    return any(history.rank(each) == rank and _signal_or_code(each) in _TERMINATION_CODES
               for each in history.facts("exit"))  # fmt: skip


def culprit_of_rank(rank: int, history: JobHistory) -> Culprit:
    """Returns a rank as a culprit, with its host and the line where its first traceback ended."""
    return Culprit(rank, host=history.hosts.get(rank, ""), where=history.exception_sites.get(rank, ""))


def _signal_or_code(match: RuleMatch) -> str:
    return match.fields.get("signal") or match.fields.get("code", "")


def _is_no_failure_of_its_own(match: RuleMatch) -> bool:
    """Whether a process ended with exit code 0, an unknown one, or SIGTERM, which the launcher sends to the rest."""
    return _signal_or_code(match) in (*_TERMINATION_CODES, "0", "")


@dataclass(frozen=True, slots=True)
class Suspects:
    """Parties that one source names, with the keys of `culprits` in `weights.yaml` that apply to the source."""

    parties: tuple[Culprit, ...]
    reasons: tuple[str, ...]

    def weight(self, weights: Mapping[str, float]) -> float:
        return sum(weights[each] for each in self.reasons)


def find_culprits(found: FailureHypothesis, history: JobHistory, weights: Mapping[str, float]) -> tuple[Culprit, ...]:
    """Returns the culprits that the logs show: those of the source with the greatest weight."""
    ranked = max(list_suspects(found, history), key=lambda each: each.weight(weights), default=None)
    return ranked.parties if ranked is not None else ()


def list_suspects(found: FailureHypothesis, history: JobHistory) -> list[Suspects]:
    """Returns all sets of parties that may be the culprits.

    The structure names them; or lines capture them, or were written by them or by those of them that raised an
    exception; or they failed first, did not join, or some line calls them failed. The lines are those of the strongest
    rule or of another one for causes. To name all ranks says little, and so does the host of a line if the rank is
    known that failed first.
    """
    if found.cls == "benign":
        return []
    process = mentioned_process(found, history)
    suspects = [Suspects((process,), ("mentioned",))] if process else []
    if found.cls in NO_FAULT and found.culprits is None:
        return suspects
    if found.culprits is not None:
        return [Suspects(_distinct(_as_culprit(each, history) for each in found.culprits), ("structure",))]
    one_fails_first = found.cls in _FIRST_FAILURE_CLASSES
    first = _distinct(likely_first_failures(history)) if one_fails_first else ()
    first_rank = any(each.rank is not None for each in first)
    suspects.append(Suspects(first, ("first_failed",)))
    service = mentioned_service(found, history) if found.cls in _OF_SERVICES else None
    suspects += [Suspects((service,), ("service",))] if service else []
    named_parties = _named_parties(found, history) if one_fails_first else ()
    if not first_rank or any(each.rank is not None for each in named_parties):
        suspects.append(Suspects(named_parties, ("named",)))
    lead = found.matches[0].rule.id if found.matches else ""
    causes = [each.rule.id for each in found.matches if each.rule.signature.role in ("cause", "sign")]
    rules = dict.fromkeys([lead, *causes])
    for rule in rules if found.matches and found.matches[0].rule.signature.culprit != "none" else ():
        other = () if rule == lead else ("other_rule",)
        for reason, named in _culprits_of_rule(rule, found.matches, history):
            ranks = [each for each in named if each.rank is not None]
            named = ranks if ranks and reason != "captured" else named
            all_ranks = len(ranks) > 1 and {each.rank for each in ranks} >= history.ranks
            says_little = all_ranks or (not ranks and first_rank)
            reasons = (reason, *other, *(("everyone",) if reason != "captured" and says_little else ()))
            suspects.append(Suspects(_distinct(_unmapped_pids_as_ranks(named, history)), reasons))
    return [each for each in suspects if each.parties]


def _named_parties(found: FailureHypothesis, history: JobHistory) -> tuple[Culprit, ...]:
    """Returns the rank that a line of the hypothesis names, else the first rank that any line calls failed, else the
    first host, process or service."""
    ranks = {rank for each in found.matches if (rank := _mentioned_rank(each, history)) is not None}
    if len(ranks) == 1:
        return (culprit_of_rank(ranks.pop(), history),)
    named = [culprit for each in history.facts("party_failed") if not history.continued_after(each)
             for culprit in _parties(each, history)]  # fmt: skip
    return tuple(sorted(named, key=lambda each: (each.rank is None, each.name == str(each.pid)))[:1])


def _parties(failed: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    if {"pid", "host"} <= failed.fields.keys():
        for each in _culprits_of_group("pid", failed.fields["pid"], failed, history):
            yield each if each.rank is not None else replace(each, host=failed.fields["host"])
        return
    for group in ("rank", "pid", "host", "party"):
        if failed.fields.get(group):
            yield from _culprits_of_group(group, failed.fields[group], failed, history)


def _distinct(named: Iterable[Culprit]) -> tuple[Culprit, ...]:
    found: dict[object, Culprit] = {}
    for each in named:
        found.setdefault((each.rank, each.host if each.rank is None else "", each.name), each)
    return tuple(found.values())[:_MAX_CULPRITS]


def _as_culprit(given: int | str | Culprit, history: JobHistory) -> Culprit:
    if isinstance(given, Culprit):
        return given
    return culprit_of_rank(given, history) if isinstance(given, int) else Culprit(None, name=given)


def _culprits_of_rule(
    rule_id: str, matches: Sequence[RuleMatch], history: JobHistory
) -> Iterator[tuple[str, list[Culprit]]]:
    """Yields the culprits according to the matches of one rule, with the reason."""
    same = [match for match in matches if match.rule.id == rule_id]
    selector = same[0].rule.signature.culprit
    if selector == "others":
        yield "missing", _missing_participants(same, history)
        return
    if not isinstance(selector, str) and selector.facts:
        yield "line", _culprits_by_facts(same, selector, history)
        return
    raising = _raising(same, history)
    for reason, chosen in (("captured", [each for each in same if _captures_culprit(each)]), ("raised", raising),
                           ("line", same)):  # fmt: skip
        yield reason, [culprit for match in chosen for culprit in _culprits_of_match(match, history)]


def _culprits_by_facts(same: Sequence[RuleMatch], selector: CulpritSelector, history: JobHistory) -> list[Culprit]:
    """Returns what the facts name; but if they are of further hosts, too, where it works, the lines' origins."""
    facts = next((found for name in selector.facts if (found := history.facts(name))), [])
    troubled = {each.origin.host for each in history.matches if each.rule.id == same[0].rule.id} - {""}
    works_elsewhere = troubled and {each.origin.host for each in facts} > troubled
    own = [culprit for each in same if works_elsewhere and (culprit := _culprit_of_origin(each, history))]
    if len(own) < len(same):
        own += [culprit for fact in facts for group in selector.groups if fact.fields.get(group)
                for culprit in _culprits_of_group(group, fact.fields[group], fact, history)]  # fmt: skip
    return own


def _unmapped_pids_as_ranks(found: Iterable[Culprit], history: JobHistory) -> list[Culprit]:
    """Replaces the culprits by all ranks if they are unknown pids, as many as there are ranks."""
    culprits = list(found)
    unknown = [each for each in culprits if each.rank is None and each.name == str(each.pid)]
    if unknown and len(unknown) == len(culprits) == len(history.ranks):
        return [culprit_of_rank(rank, history) for rank in sorted(history.ranks)]
    return culprits


def _missing_participants(same: Sequence[RuleMatch], history: JobHistory) -> list[Culprit]:
    """Returns the ranks that did not report joining, if their number agrees with "joined n of m" in the lines;
    otherwise the hosts whose files have no such report.

    Ranks that lost the connection to the store had joined too.
    """
    joined = [*same, *history.facts("store_lost")]
    counted = [match.fields for match in same if {"size", "joined"} <= match.fields.keys()]
    counts = [int(each["size"]) - int(each["joined"]) for each in counted]
    ranks = history.ranks.union(*(range(size) for each in counted if (size := int(each["size"])) <= MAX_RANKS))
    reporting = {history.rank(each) for each in joined}
    writing = {origin.rank for log in history.logs for origin in (*log.origins, log.origin)}
    for present in (reporting, writing - {None}) if counts else (reporting,):
        missing = sorted(ranks - present)
        if missing and present and None not in present and all(count == len(missing) for count in counts):
            return [culprit_of_rank(rank, history) for rank in missing]
    files = {each.source for each in joined}
    hosts = {log.origin.host for log in history.logs if log.origin.host and log.source not in files}
    return [Culprit(None, host=each, name=each) for each in sorted(hosts)]


def _raising(same: Sequence[RuleMatch], history: JobHistory) -> list[RuleMatch]:
    """Returns the matches of ranks that raised an exception."""
    if same[0].rule.signature.culprit != "line":
        return []
    raising = {_origin_key(origin) for origin, _, _, _ in history.tracebacks} - {None}
    return [each for each in same if _origin_key(each.origin) in raising]


def _origin_key(origin: LineOrigin) -> object:
    """Returns what identifies an origin: rank, else pid, else host; None if nothing is known."""
    return origin.rank if origin.rank is not None else (origin.pid or origin.host or None)


def _captures_culprit(match: RuleMatch) -> bool:
    """Whether the pattern of a match captured a culprit."""
    selector = match.rule.signature.culprit
    if isinstance(selector, str) or selector.facts:
        return False
    return any(match.fields.get(group) for group in selector.groups)


def _culprits_of_match(match: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    """Yields the culprits that the rule's `culprit` names for a match: captured values or, without any, the origin of
    the line."""
    selector = match.rule.signature.culprit
    if selector == "none":
        return
    if isinstance(selector, str):
        captured = []
    else:
        captured = [(group, match.fields[group]) for group in selector.groups if match.fields.get(group)]
        captured = captured if selector.all else captured[:1]
    for group, value in captured:
        yield from _culprits_of_group(group, value, match, history)
    about = [] if captured else history.failed_parties.get(match.place, [])
    for each in about:
        yield from _parties(each, history)
    if not captured and not about and (culprit := _culprit_of_origin(match, history)) is not None:
        yield culprit


def _culprits_of_group(group: str, value: str, match: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    if group == "rank" or (group == "peer" and re.fullmatch(r"[\d, ]+", value)):
        for number in re.findall(r"\d+", value):
            yield culprit_of_rank(int(number), history)
    elif group == "pid":
        rank = history.rank_of_pid.get(int(value)) if value.isdigit() else None
        yield (
            culprit_of_rank(rank, history)
            if rank is not None
            else Culprit(None, host=match.origin.host, pid=int(value), name=history.log_of_pid.get(int(value), value))
        )
    elif group in ("host", "address", "peer"):
        yield Culprit(None, host=history.alias(value), name=value)
    elif group == "device":
        yield Culprit(None, host=match.origin.host, name=value)
    else:
        yield Culprit(None, name=value)


def _culprit_of_origin(match: RuleMatch, history: JobHistory) -> Culprit | None:
    """Returns the origin of a line as a culprit; None if nothing is known about it.

    This is the rank; if it is unknown, the node that the line mentions, the host, the service that wrote the file, or
    the role.
    """
    where = match.traceback.where if match.traceback else ""
    rank = match.origin.rank if match.origin.rank is not None else history.rank(match)
    rank = _mentioned_rank(match, history) if rank is None else rank
    raiser = history.raisers.get(match.place, match.origin)
    rank = raiser.rank if rank is None else rank
    of_worker = _MENTIONED_PID.search(match.text) if rank is None else None
    rank = history.rank_of_pid.get(int(of_worker[1] or of_worker[2])) if of_worker else rank
    host = match.origin.host or _host_of_task(match.origin.label, history)  # srun labels lines with the task
    mentioned = _MENTIONED_NODE.search(match.text)
    node = match.fields.get("ip", "")
    if mentioned and not node:
        node = next((name for name in mentioned.groups() if name), "")
    node = node or ("" if match.origin.pid is not None else raiser.host)
    role = "" if _DRIVERS.search(match.origin.role) else match.origin.role
    if rank is not None:
        known = culprit_of_rank(rank, history)
        return replace(known, where=where or known.where, role=match.origin.role, pid=match.origin.pid)
    if node:
        return Culprit(None, host=history.alias(node), name=node, where=where, role=role, pid=raiser.pid)
    if host:
        return Culprit(None, host=host, name=history.alias(host), where=where, role=role, pid=match.origin.pid)
    file_name = PurePosixPath(match.file).stem
    if len(history.logs) > 1 and not _JOB_FILE.fullmatch(file_name):
        return Culprit(None, name=file_name, role=file_name, where=where)
    return Culprit(None, name=role, role=role, where=where, pid=match.origin.pid) if role else None


def _mentioned_rank(match: RuleMatch, history: JobHistory) -> int | None:
    """Returns the only rank that a message of trouble names; None if it names none or several. Processes must be known
    ranks, since the number may be a pid."""
    prefix = _RANK_PREFIX.search(match.text)
    if prefix is not None:
        return int(prefix["rank"])
    if not names_trouble(match.text):
        return None
    found = {(int(each["rank"]), each["process"]) for each in _RANK_IN_PROSE.finditer(match.text)}
    named = {rank for rank, process in found if process is None or rank in history.ranks}
    return named.pop() if len(named) == 1 else None


def _host_of_task(task: int | None, history: JobHistory) -> str:
    """Returns the host of an srun task, according to the message about the end of the task; "" if it is unknown."""
    ends = [each.fields for each in history.facts("exit")] if task is not None else []
    return next((each["host"] for each in ends if each.get("task") == str(task) and each.get("host")), "")
