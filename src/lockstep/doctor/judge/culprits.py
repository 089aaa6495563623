"""Finds the culprits of a failure: ranks, hosts, addresses, interfaces, devices or services."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from lockstep.doctor.judge.job_history import JobHistory, match_order
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.watch.diagnosis.verdict import Culprit

_TERMINATION_CODES = ("SIGTERM", "Terminated", "-15", "15", "143")
_KILL_CODES = ("SIGKILL", "Killed", "-9", "137", "Out Of Memory")


def first_failed(history: JobHistory) -> Iterator[Culprit]:
    """Yields the ranks or hosts that failed first.

    Killed processes take precedence over others; processes that the launcher ended are ignored.
    """
    exits = [each for each in history.facts("exit") if not _ended_by_launcher(each)]
    killed = [each for each in exits if _signal_or_code(each) in _KILL_CODES]
    first = killed or sorted(history.facts("first_failure"), key=match_order)[:1] or exits[:1]
    for each in first:
        task = each.fields.get("task", "")
        rank = int(task) if task.isdigit() else history.rank(each)
        if rank is not None:
            yield replace(culprit_of_rank(rank, history), host=history.hosts.get(rank, each.fields.get("host", "")))
        elif each.fields.get("host"):
            yield Culprit(None, host=each.fields["host"], name=each.fields["host"])


def ended_by_signal(history: JobHistory) -> bool:
    """Whether a signal that the launcher did not send ended a process."""
    exits = [each for each in history.facts("exit") if not _ended_by_launcher(each)]
    return any(_signal_or_code(each).startswith(("-", "SIG")) or _signal_or_code(each) in _KILL_CODES for each in exits)


def culprit_of_rank(rank: int, history: JobHistory) -> Culprit:
    """Returns a rank as a culprit, with its host and the line where its first traceback ended."""
    return Culprit(rank, host=history.hosts.get(rank, ""), where=history.exception_sites.get(rank, ""))


def _signal_or_code(match: RuleMatch) -> str:
    return match.fields.get("signal") or match.fields.get("code", "")


def _ended_by_launcher(match: RuleMatch) -> bool:
    return _signal_or_code(match) in (*_TERMINATION_CODES, "0", "")


_MAX_CULPRITS = 64
_FIRST_FAILURE_CLASSES = frozenset((
    "host_oom", "rank_oom", "cuda_kernel_error", "gpu_hardware_fault", "rank_exception_masked", "shm_too_small",
    "os_limits", "storage_fault", "remote_service_timeout", "nan_or_inf",
    "external_kill", "watchdog_or_heartbeat", "framework_bug", "gpu_binding",
))  # fmt: skip
"""Failure classes in which one process fails first. If no line names that process, the first process that ended with
an error is the culprit."""
_ADDRESS = r"\d{1,3}(?:\.\d{1,3}){3}"
_MENTIONED_NODE = re.compile(
    rf"\b(?:ip|IP)[=:] ?(?P<a>{_ADDRESS})|\b(?:on|at|of|this) node (?P<b>{_ADDRESS}|(?=[\w.-]*\d)[A-Za-z][\w.-]+)"
    rf"|[Nn]ode failure on (?P<c>[\w.-]+)|\baddress: (?P<d>{_ADDRESS})|\b(?:on|of) host (?P<e>[\w.-]+)"
)
_RANK_PREFIX = re.compile(r"(?:^|Error: )\[?[Rr]ank (?P<rank>\d+)[\],:](?! [Rr]ank \d)")
"""The begin of a message that names the rank which raised it."""
_SERVICE = re.compile(r"(?i)(?:server|service|reward|judge|scorer|frontend|router|engine|gateway|proxy)")
_DRIVERS = re.compile(
    r"(?i)task_?runner|main_task|driver|entrypoint|raylet|gcs_server|autoscaler|apiserver|engine_?core$"
)


def find_culprits(candidate: Candidate, history: JobHistory) -> tuple[Culprit, ...]:
    """Returns all culprits that the logs show."""
    if candidate.cls == "benign" or (candidate.cls == "unknown" and candidate.culprits is None):
        return ()
    if candidate.culprits is not None:
        found = _replace_by_listed([_as_culprit(each, history) for each in candidate.culprits], history)
    else:
        found = list(_culprits_of_matches(candidate, history))
    return tuple(dict.fromkeys(found))[:_MAX_CULPRITS]


def _replace_by_listed(guessed: list[Culprit], history: JobHistory) -> list[Culprit]:
    """Replaces guessed culprits by the list in a message, if the list contains all of them and more."""
    ranks = {each.rank for each in guessed}
    listed = (
        list(_culprits_of_match(each, history))
        for each in history.matches
        if _captures_culprit(each) and _lists_all(each)
    )
    return next((culprits for culprits in listed if ranks < {each.rank for each in culprits}), guessed)


def _as_culprit(origin: int | str | Culprit, history: JobHistory) -> Culprit:
    if isinstance(origin, Culprit):
        return origin
    return culprit_of_rank(origin, history) if isinstance(origin, int) else Culprit(None, name=origin)


def _culprits_of_matches(candidate: Candidate, history: JobHistory) -> Iterator[Culprit]:
    if not candidate.matches:
        return
    lead = candidate.matches[0].rule
    common_host = _common_host(history)

    def specific_culprits(rule: str) -> list[Culprit]:
        found = _culprits_of_rule(rule, candidate.matches, history)
        return [each for each in found if not common_host or each.rank is not None or each.host != common_host]

    found = specific_culprits(lead.id)
    if not found and lead.signature.culprit != "none":
        causes = dict.fromkeys(each.rule.id for each in candidate.matches if each.rule.signature.role == "cause")
        first = list(first_failed(history)) if candidate.cls in _FIRST_FAILURE_CLASSES else []
        found = next(filter(None, map(specific_culprits, causes)), first) or _culprits_of_rule(
            lead.id, candidate.matches, history
        )
    yield from _unmapped_pids_as_ranks(found, history)


def _common_host(history: JobHistory) -> str:
    """Returns the host from which all lines come, so that the host distinguishes nothing; "" if there are several."""
    logs = [each for each in history.logs if each.source not in history.old_sources]
    of_lines = [origin.with_defaults(each.origin).host for each in logs for origin in each.origins]
    hosts = {*of_lines, *(each.origin.host for each in logs if not each.origins)}
    return hosts.pop() if len(hosts) == 1 else ""


def _culprits_of_rule(rule: str, matches: Sequence[RuleMatch], history: JobHistory) -> list[Culprit]:
    """Returns the culprits according to the matches of one rule."""
    same = [each for each in matches if each.rule.id == rule]
    if same[0].rule.signature.culprit == "others":
        return _missing_participants(same, history)
    found: dict[object, Culprit] = {}
    for group in ([each for each in same if _captures_culprit(each)], _prefer_raising(same, history), same):
        for each in (each for match in group for each in _culprits_of_match(match, history)):
            found.setdefault((each.rank, each.host if each.rank is None else "", each.name), each)
        if found:
            break
    return list(found.values())


def _unmapped_pids_as_ranks(found: Iterable[Culprit], history: JobHistory) -> list[Culprit]:
    """Replaces the culprits by all ranks if they are unknown pids, as many as there are ranks."""
    culprits = list(found)
    unknown = [each for each in culprits if each.rank is None and each.name == str(each.pid)]
    if unknown and len(unknown) == len(culprits) == len(history.ranks):
        return [culprit_of_rank(rank, history) for rank in sorted(history.ranks)]
    return culprits


def _missing_participants(same: Sequence[RuleMatch], history: JobHistory) -> list[Culprit]:
    """Returns the known ranks without such a line, if their number agrees with the lines; otherwise the hosts without
    such a line in their files.

    Ranks that lost the connection to the store had joined too.
    """
    joined = [*same, *history.facts("store_lost")]
    reporting = {history.rank(each) for each in joined}
    missing = [rank for rank in sorted(history.ranks) if rank not in reporting]
    counts = {int(each.fields["size"]) - int(each.fields["joined"]) for each in same
              if {"size", "joined"} <= each.fields.keys()}  # fmt: skip
    if missing and None not in reporting and counts <= {len(missing)}:
        return [culprit_of_rank(rank, history) for rank in missing]
    files = {each.source for each in joined}
    hosts = {log.origin.host for log in history.logs if log.origin.host and log.source not in files}
    return [Culprit(None, host=each, name=each) for each in sorted(hosts)]


def _prefer_raising(same: Sequence[RuleMatch], history: JobHistory) -> list[RuleMatch]:
    """Drops the matches of ranks that raised no exception, if other ranks with the same line raised one."""
    if not same or same[0].rule.signature.culprit != "line":
        return list(same)
    raising = {_origin_key(origin) for origin, _, _, _ in history.tracebacks} - {None}
    return [each for each in same if _origin_key(each.origin) in raising] or list(same)


def _origin_key(origin: LineOrigin) -> object:
    """Returns what identifies an origin: rank, else pid, else host; None if nothing is known."""
    return origin.rank if origin.rank is not None else (origin.pid or origin.host or None)


def _lists_all(match: RuleMatch) -> bool:
    """Whether the line of a match lists all culprits."""
    selector = match.rule.signature.culprit
    return not isinstance(selector, str) and selector.all


def _captures_culprit(match: RuleMatch) -> bool:
    """Whether the pattern of a match captured a culprit."""
    selector = match.rule.signature.culprit
    if isinstance(selector, str) or selector.facts:
        return False
    return any(
        match.fields.get(group) for group in ((selector.group,) if isinstance(selector.group, str) else selector.group)
    )


def _culprits_of_match(match: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    selector = match.rule.signature.culprit
    if selector == "none":
        return
    if isinstance(selector, str):
        yield from culprit_of_origin(match, history)
        return
    groups = (selector.group,) if isinstance(selector.group, str) else selector.group
    if selector.facts:
        fact_matches = next((facts for name in selector.facts if (facts := history.facts(name))), [])
        for each in fact_matches:
            for group in groups:
                if each.fields.get(group):
                    yield from _culprits_of_group(group, each.fields[group], each, history)
        return
    for group in groups:
        value = match.fields.get(group)
        if value:
            yield from _culprits_of_group(group, value, match, history)
            if not selector.all:
                return
    if not any(match.fields.get(group) for group in groups):
        yield from culprit_of_origin(match, history)


def _culprits_of_group(group: str, value: str, match: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    if group == "rank" or (group == "peer" and re.fullmatch(r"[\d, ]+", value)):
        for number in re.findall(r"\d+", value):
            yield culprit_of_rank(int(number), history)
    elif group == "pid":
        rank = history.rank_of_pid.get(int(value)) if value.isdigit() else None
        yield (
            culprit_of_rank(rank, history)
            if rank is not None
            else Culprit(None, host=match.origin.host, pid=int(value), name=value)
        )
    elif group in ("host", "address", "peer"):
        yield Culprit(None, host=history.alias(value), name=value)
    elif group == "device":
        yield Culprit(None, host=match.origin.host, name=value)
    else:
        yield Culprit(None, name=value)


def culprit_of_origin(match: RuleMatch, history: JobHistory) -> Iterator[Culprit]:
    """Yields the origin of a line as a culprit.

    This is the rank; if it is unknown, the node that the line mentions, the host, the service that wrote the file, or
    the role.
    """
    where = match.traceback.where if match.traceback else ""
    rank = match.origin.rank if match.origin.rank is not None else history.rank(match)
    prefix = _RANK_PREFIX.search(match.text) if rank is None else None
    rank = int(prefix["rank"]) if prefix else rank
    host = match.origin.host or _host_of_task(match.origin.label, history)
    mentioned = _MENTIONED_NODE.search(match.text)
    node = next((each for each in mentioned.groups() if each), "") if mentioned else ""
    remote_node = match.fields.get("ip", "")
    role = "" if _DRIVERS.search(match.origin.role) else match.origin.role
    if rank is not None:
        known = culprit_of_rank(rank, history)
        yield replace(known, where=where or known.where, role=match.origin.role, pid=match.origin.pid)
    elif node := remote_node or node:
        yield Culprit(None, host=history.alias(node), name=node, where=where, role=role)
    elif host:
        yield Culprit(None, host=host, name=history.alias(host), where=where, role=role, pid=match.origin.pid)
    elif _SERVICE.search(PurePosixPath(match.file).stem):
        name = PurePosixPath(match.file).stem
        yield Culprit(None, name=name, role=name, where=where)
    elif role:
        yield Culprit(None, name=role, role=role, where=where, pid=match.origin.pid)


def _host_of_task(task: int | None, history: JobHistory) -> str:
    """Returns the host of an srun task, according to the message about the end of the task; "" if it is unknown."""
    ends = [each.fields for each in history.facts("exit")] if task is not None else []
    return next((each["host"] for each in ends if each.get("task") == str(task) and each.get("host")), "")
