"""Finds the rank, host, role and process that wrote a log line.

The sources are the prefixes of launchers and frameworks, file names, launcher labels and pids.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath

from lockstep.doctor.logs import process_names, record_fields
from lockstep.doctor.logs.timestamps import TimestampParser

_MAX_PREFIXES = 8
"""Maximum number of prefixes parsed per line."""
_HEAD_CHARS = 400
"""Characters of a line that are searched for a rank without brackets."""
_PARSED_LINES = 4096
"""Most lines are parsed twice: near an end of the file, and because they contain a text of a rule."""


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """The rank, host, role and process that wrote a line, as far as known."""

    rank: int | None = None
    host: str = ""
    role: str = ""
    pid: int | None = None
    local_rank: int | None = None
    """The number of the process or its GPU on the host."""
    label: int | None = None
    """The number that the launcher gives a process: the task of srun or mpirun, the local rank of torchrun."""
    rank_is_label: bool = False
    """`rank` is only a copy of the label, because the line contains nothing more precise."""

    def __bool__(self) -> bool:
        return self.rank is not None or bool(self.host or self.role) or self.pid is not None

    def with_defaults(self, other: "LineOrigin") -> "LineOrigin":
        """Returns this origin with its unknown parts filled in from another origin."""
        if not other:
            return self
        if not self:
            return other
        return LineOrigin(  # several times as fast as `replace`
            other.rank if self.rank is None and not (self.role and other.role != self.role) else self.rank,
            self.host or other.host,
            self.role or other.role,
            self.pid if self.pid is not None else other.pid,
            self.local_rank if self.local_rank is not None else other.local_rank,
            self.label,
            self.rank_is_label,
        )


UNKNOWN_ORIGIN: LineOrigin = LineOrigin()
PLACING_FACTS = "placed", "exit"
"""Facts that say which process a rank is."""
Forms = tuple[re.Pattern[str], ...]
"""Patterns for prefixes, some with a group: `label`, the number of a rank, `name`, of a host, `party`, of a process."""

_STAMPS = (
    r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?",
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d(?: \d{4})?",
    r"[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d",
    r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d(?:[.,]\d+)?",
    r"\d{8}-\d\d:\d\d:\d\d(?:[.,]\d+)?",
    r"\d\d:\d\d:\d\d(?:[.,]\d+)?",
)
_RANK = r"(?:[Gg]lobal[_ ]?)?(?:rank|Rank|RANK)"
_PART = r"(?:local|node|group|[A-Z]{2}|tensor|pipeline|data|expert|model)"
"""Kinds of rank that number only a part of the job."""
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|SUCCESS|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_TOLD_OF = (
    r"(?:is|was|has|had|have|did|does|died|failed|timed|never|not|no|exited|crashed|killed|lost|missing|stopped|hung|hangs"
    r"|stuck|terminated|joined|left|got|ran|hit|cannot|could|can|also|and|or|of|on|at|to|from|with|by|in|reports?|reported"
    r"|raised|entered|waits?|waited|waiting|will|seems|took)\b|->"
)
"""Words after a rank with which somebody else tells of it."""
_HOST = (
    r"(?:\d{1,3}(?:\.\d{1,3}){3}"
    r"|(?=[\w.-]{0,62}\d)(?=[\w.-]{0,62}[-.]|[a-z]{1,60}\d{2,}|[a-z]{1,5}\d{1,60}\b)[A-Za-z][\w.-]{2,62})"
)
_PREFIX = re.compile(
    r"\s*(?:"
    rf"\[(?:{'|'.join(_STAMPS)})(?: [A-Z]{{2,3}}\d+)*?,? (?:{_RANK}|TP)[ _:=#]?"
    r"(?P<stamped>\d{1,6})(?: [A-Z]{2,3}\d+)*\]"
    rf"|\[NeMo [A-Z] (?:{'|'.join(_STAMPS)})[^\]]{{0,80}}\]"
    rf"|\[?(?:{'|'.join(_STAMPS)})\]?(?=[\s:\[\],|]|$)[,:]?"
    r"|\[(?:rank|RANK|Rank)[ _]?(?P<rank>\d{1,6})\](?::| ?\||(?=\s|\[|:|$))"
    r"|\[(?:default|trainer|worker)[ _]?(?P<role>\d{1,6})\](?::| ?\||(?=\s|\[|:|$))"
    r"|\[(?:[\w.@-]{1,80},)?(?:mpirank:)?(?P<mpi>\d{1,6})(?:,(?P<mpihost>[\w.-]+))?\]<(?:stdout|stderr|stddiag)>:"
    r"|(?:stdout|stderr) [FP](?: |$)|(?:> ?)+"
    rf"|(?:[\w.-]{{1,128}}\.\d{{1,6}}\.[\w.-]{{1,128}}@)?(?P<container>{_HOST})"
    r"(?: +\|(?: |$)| [a-z][a-z0-9-]* (?=\[rank\d))"
    r"|<\d{1,3}>1 \S{10,40} (?P<rfc>[A-Za-z][\w.-]*) [\w./@-]{1,48} (?:(?P<rpid>\d{1,7})|-) \S{1,32} -(?= |$)"
    r"|(?<=[\dZ] )(?P<syslog>[A-Za-z][\w.-]*) [A-Za-z][\w./@:-]*\[\d+\]:(?= |$)"
    r"|\((?P<actor>[A-Za-z_][\w.<>\[\]-]*(?:\([\w.]*\))?)(?: rank=(?P<arank>\d+))?(?: pid=(?P<pid>\d+))"
    r"(?:, ip=(?P<ip>[\w.:-]+?))?\)"
    r"|\((?P<daemon>raylet|gcs_server|autoscaler|bundle_reservation_check_func)(?:, ip=(?P<dip>[\w.:-]+))?\)"
    r"|\((?:head|worker\d+),? rank=(?P<sky>\d+)[^)]*\)"
    rf"|\[(?!c10d\b|{_RANK}\b|{_RANK}[_-]?\d)(?P<bracket>{_HOST})(?::(?P<blocal>\d+))?\]:?(?=\s|$)"
    r"|\[pod/(?P<pod>[\w.-]+)/[\w.-]+\]"
    r"|(?P<slurm>\d{1,5}):(?= |$) ?"
    rf"|(?!{_RANK}[_-]?\d)(?P<pdsh>{_HOST}):(?= |$) ?"
    r"|(?P<nhost>[A-Za-z][\w.-]*):(?P<npid>\d+):\d+ \[(?P<dev>-?\d+)\]"
    r"|(?P<khost>[\w.-]+) kernel:(?: \[ *\d+\.\d+\])?"
    r"|\[?[IWEFDC](?:20\d\d)?\d{3,4} \d\d:\d\d:\d\d(?:\.\d+)?(?: +(?P<gpid>\d+))? [\w./-]+:\d+\]"
    rf"|\[(?:Rank|RANK|worker(?:_rank)?|global_rank|DP|GPU|(?:{process_names.WORDS})(?:_id|_index)?)[ _:=]*"
    r"(?P<srank>\d{1,6})(?: ?(?:/|of) ?\d+)?\]"
    rf"|[\[({{<](?!{_PART}\b)"
    rf"(?:(?:(?P<rhost>{_HOST})|[A-Za-z][\w.-]*(?::\d+)?)[/:,| ] ?)?(?:{_RANK}[ _:=#-]{{0,2}}|[Rr])"
    r"(?P<wrapped>\d{1,6})(?: ?(?:/|of) ?\d+)?(?:[ ,;|]+pid[ =:]*(?P<wpid>\d+))?[\])}>](?::(?=\s|$)| ?\||(?=[\s\[]|$))"
    rf"|(?:[-|] ?)?(?:(?P<bhost>{_HOST})[/:])?{_RANK}[ _:=#-]{{0,2}}(?P<bare>\d{{1,6}})(?: ?(?:/|of) ?\d+)?"
    r"(?: [\[(]pid[ =:]*(?P<bpid>\d+)[\])])?(?::(?=\s|$)|(?=\s*\|)|(?=\s+- ))"
    r"|(?:trainer|worker|rank|Rank|RANK|proc)\[(?P<index>\d{1,3})\](?::|(?=\s|$))"
    r"|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./-]+:\d+\]"
    rf"|(?:[-|] )?{_LEVEL}(?:(?=\s*\||\s+- |\s+\[|\s+\d{{2,4}}[-/:]\d\d)"
    r"|:[A-Za-z_][\w.]*:|:(?=\s|\d{4}-)|\s[\w.-]+:\d+ --(?=\s))"
    r"|[DIWECF] (?=\d{4}[-/]\d\d[-/])"
    r"|[-|] [\w.<>-]{2,60}(?::[\w<>.]+:\d+)?(?=\s*\||\s+- )"
    r"|r(?P<short>\d{1,5}) (?=\w+ [DIWEC] )|(?:worker|stage|process|task|trainer|proc) (?P<named>\d{1,5}):(?= )"
    rf"|(?<=[\d\])A-Z:|-] ){_RANK}[ =#](?P<told>\d{{1,6}})(?= (?!{_TOLD_OF})\S)"
    rf"|(?<=[\d\]):] ){_LEVEL}(?= \S)"
    rf"|{_LEVEL}:? r(?P<leveled>\d{{1,5}})(?=[: ])"
    r"|\[(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|info|error|warn)\]:?"
    r"|\[[\w./<>-]{2,60}(?::\d+)?(?::[\w<>]+)?\](?=\[|\s-\s|\s\[|\s\d{4}-\d\d-)|- (?=\[)"
    r")"
)
_SEPARATOR = re.compile(r"\s*[-|](?=\s) ?")
"""The separator between the last prefix and the message."""
_KEY_VALUES = re.compile(rf"\s*(?:[\w.]+=(?:\"[^\"]*\"|\S+)\s+){{0,6}}{_RANK}=(?P<rank>\d{{1,6}})(?=\s|$)")
"""A line of names and values, such as `time=... level=info rank=3 msg=...`."""
_MENTIONED_RANK = re.compile(
    r"\[PG (?:ID )?[^\]]{0,60}?Rank (?P<a>\d+)\]|\[Rank (?P<b>\d+)\]|\"rank\": ?(?P<c>\d+)"
    r"|\brank[ =:_]{1,2}(?P<d>\d+)\b|\bRank[ =:]{1,2}(?P<e>\d+)\b|\[rank(?P<f>\d+)\]"
)
_PROCESS_GROUP_RANK = re.compile(r"\[PG (?:ID )?[^\]]{0,60}?Rank (?P<a>\d+)\]|^\[Rank (?P<b>\d+)\]|\[rank(?P<c>\d+)\]:")
_VLLM_WORKER = re.compile(r"^(?:VllmWorker|Worker)_?(?:TP|PP|DP)?-?(?P<n>\d+)$")

_FILE_NODE = re.compile(r"(?:^|[/_.-])(?:node|host|n)[_.-]?(?P<node>\d{1,5})(?=[/_.-]|$)")
_TORCHRUN_FILE = re.compile(r"(?:^|/)attempt_(?P<attempt>\d+)/(?P<rank>\d+)/(?:stdout|stderr|error)")
_FILE_HOST = re.compile(rf"(?:^|[/_])(?P<host>{_HOST})$")
_TOOL_NAME = re.compile(
    r"^(?:(?:py-?spy|nvidia-smi|ibstat|strace)[_.-]|(?:probe|dmesg|gpu|ps|stack|env|top|node|host)_)"
    r"|[_.-](?:py-?spy|nvidia-smi|ibstat|strace|env|ps|top|stack)$"
)
_KERNEL_LOG = r"(?:dmesg|kern(?:el)?|syslog|messages|journal(?:ctl)?)"
_KERNEL_FILE = re.compile(rf"^{_KERNEL_LOG}(?:\.log|[_-]T)?[_.@-](?P<after>.+)$|^(?P<before>.+?)[_.-]{_KERNEL_LOG}$")
_KERNEL_HOST = re.compile(r"(?=[^\d]*\d|(?:host|node|gpu|worker|server|head|master|login|compute)[-_.])[A-Za-z][\w.-]*")
"""The host in the name of a kernel log. A kernel log always belongs to a host, so fewer forms of names are excluded."""
_NOT_A_HOST = re.compile(r"(?:job|slurm|run|attempt|step|boot|part|after|before)[-_.]?\d*")
_PROGRAM_NAME = re.compile(
    r"^(?:raylet|gcs(?:[-_]server)?|dashboard(?:[-_]agent)?|(?:runtime[-_]env[-_])?agent|(?:log[-_])?monitor"
    r"|(?:python[-_])?core[-_](?:worker|driver)|torchrun|elastic|watchdog)(?:[-_.]\d+)?(?:[-_](?=\D)|$)"
)
"""Programs that run on every host. A number after the name only distinguishes instances; the host may come next."""
_FILE_ADDRESS = re.compile(
    r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?=[_.-]|$)(?!\.\d)"
)
_JOB_NAMES = re.compile(
    r"^(?:slurm|job|ray_job|job-driver|train|run|driver|console|launcher|log|stdout|stderr|raysubmit|eval|grpo|sft|ppo"
    r"|step|checkpoint|output|out)[-_.\d]"
)


@dataclass(frozen=True, slots=True)
class ParsedPrefix:
    """The parsed prefixes of a line.

    Attributes:
        origin: What the prefixes say about the line's origin.
        at: Position in the line at which the message begins.
        when: The timestamp of the line; None if the line has none.
    """

    origin: LineOrigin
    at: int
    when: float | None


def parse_prefixes(line: str, clock: TimestampParser, learned: Forms = ()) -> ParsedPrefix:
    """Parses the prefixes of a line.

    Args:
        learned: Further forms of prefixes, see `learned_prefix`.
    """
    return ParsedPrefix(*origin_of_line(line, learned), clock.read(line))


@lru_cache(maxsize=_PARSED_LINES)
def origin_of_line(line: str, learned: Forms) -> tuple[LineOrigin, int]:
    """Returns what the prefixes of a line say, and where its message begins."""
    origin, at = UNKNOWN_ORIGIN, 0
    for _ in range(_MAX_PREFIXES):
        of_file = next((found for each in learned if (found := each.match(line, at))), None)
        if of_file:
            groups = of_file.groupdict()
            label = groups.get("label")
            number = int(label) if label and origin.rank is None else None
            own = LineOrigin(
                number, groups.get("name") or "", groups.get("party") or "", None, None, number, bool(label)
            )
            origin = own.with_defaults(origin)
            at = of_file.end()
            continue
        found = _PREFIX.match(line, at)
        if not found or found.end() == at:
            break
        if line[:at].strip() and any(found[name] for name in _OUTERMOST_GROUPS):
            break
        if found["pdsh"] and found["pdsh"].endswith(_NO_HOST_ENDS):
            break
        origin = _with_prefix(origin, found)
        at = found.end()
    if line.startswith("{", at):
        return LineOrigin(*record_fields.of_json(line, at, _HEAD_CHARS)).with_defaults(origin), at
    if not origin.role and "level=" in line[:_HEAD_CHARS]:
        origin = replace(origin, role=record_fields.party_of_pairs(line, _HEAD_CHARS))
    separator = _SEPARATOR.match(line, at) if at else None
    at = separator.end() if separator else at
    if (origin.rank is None or origin.rank_is_label) and "ank" in line[:_HEAD_CHARS]:
        found = _PROCESS_GROUP_RANK.search(line[at : at + _HEAD_CHARS]) or _KEY_VALUES.match(line, at)
        if found:
            origin = replace(origin, rank=int(next(each for each in found.groups() if each)), rank_is_label=False)
    return origin, at


_RANK_GROUPS = ("rank", "arank", "sky", "srank", "stamped", "wrapped", "bare", "index", "short", "named", "leveled",
                "told")  # fmt: skip
_LABEL_GROUPS = ("role", "mpi", "slurm")
_PID_GROUPS = ("npid", "wpid", "bpid", "gpid", "rpid")
_HOST_GROUPS = ("bracket", "pod", "container", "pdsh", "nhost", "khost", "syslog", "rfc", "rhost", "bhost", "mpihost")
_OUTERMOST_GROUPS = ("slurm", "pdsh", "container")
_NO_HOST_ENDS = ("Error", "Exception", "Warning")
"""Ends of the names of exceptions, whose module may have a digit like a host."""


def _with_prefix(origin: LineOrigin, found: re.Match[str]) -> LineOrigin:
    """Adds the information of one prefix. A rank takes precedence over a label; of nested Ray actors, the innermost is
    the origin."""
    if found.lastindex is None:
        return origin
    rank, rank_is_label = origin.rank, origin.rank_is_label
    number, label = _first_group(found, _RANK_GROUPS), _first_group(found, _LABEL_GROUPS)
    if number and (rank is None or rank_is_label):
        rank, rank_is_label = int(number), False
    if label and rank is None:
        rank, rank_is_label = int(label), True
    host = found["ip"] or found["dip"] or origin.host or _first_group(found, _HOST_GROUPS)
    process = process_names.LABEL.fullmatch(host) if host and rank is None else None
    if process:
        host, label = origin.host, process["label"]
        rank, rank_is_label = int(label), True
    role = found["actor"] or found["daemon"] or origin.role
    worker = _VLLM_WORKER.match(role) if found["actor"] and rank is None else None
    pid = found["pid"] or (_first_group(found, _PID_GROUPS) if origin.pid is None else "")
    device = found["dev"] or found["blocal"] or found["role"]
    return LineOrigin(
        int(worker["n"]) if worker else rank,
        host,
        role,
        int(pid) if pid else origin.pid,
        int(device) if device and origin.local_rank is None and not device.startswith("-") else origin.local_rank,
        int(label) if label else origin.label,
        rank_is_label,
    )


def _first_group(found: re.Match[str], names: Iterable[str]) -> str:
    return next((found[name] for name in names if found[name]), "")


def mentioned_rank(line: str) -> int | None:
    """Returns the rank mentioned in the text of a line whose prefixes name none; None if there is none."""
    found = _MENTIONED_RANK.search(line[:400])
    return None if found is None else int(next(each for each in found.groups() if each))


def origin_of_file(name: str) -> tuple[LineOrigin, int | None]:
    """Returns the origin of the lines of a file according to its name, and the node number in the name."""
    attempt = _TORCHRUN_FILE.search(name)
    if attempt:
        return LineOrigin(int(attempt["rank"])), None
    address = _FILE_ADDRESS.search(PurePosixPath(name).name)
    if address:
        return LineOrigin(host=address[0]), None
    stem = re.sub(r"(?:\.(?:log|txt|out|err|jsonl?|csv|stdout|stderr|gz|xz|bz2|zst|\d))+$", "", name)
    last = PurePosixPath(stem).name
    rank, node = process_names.FILE_RANK.search(name), _FILE_NODE.search(last)
    number = int(node["node"]) if node else None
    kernel = _KERNEL_FILE.match(last)
    named = (kernel["after"] or kernel["before"]) if kernel else ""
    if named and not process_names.NOT_A_HOST.match(named):
        known = _KERNEL_HOST.fullmatch(named) and not _NOT_A_HOST.fullmatch(named)
        return LineOrigin(host=named if known else _host_of_folder(stem)), number
    if rank and not node:
        return LineOrigin(int(rank["label"]), host=_host_of_name(stem, last)), None
    return LineOrigin(host=_host_of_name(stem, last)), number


_RUN_NAME = re.compile(r"^[a-z]+-[a-z]+-\d+(?:_|$)|^[a-z]+-[a-z]+$|_\d{5,}")
"""Names generated by experiment trackers and schedulers."""


def _host_of_name(stem: str, last: str) -> str:
    if _JOB_NAMES.match(last) or _RUN_NAME.search(last):
        return ""
    last = process_names.FILE_SUFFIX.sub("", _TOOL_NAME.sub("", _TOOL_NAME.sub("", last)))
    last = _PROGRAM_NAME.sub("", last, count=1)
    found = _FILE_HOST.search(last)
    if found:
        return "" if process_names.NOT_A_HOST.match(found["host"]) else found["host"]
    return _host_of_folder(stem)


def _host_of_folder(stem: str) -> str:
    parent = PurePosixPath(stem).parent.name
    found = _FILE_HOST.match(parent) if parent and not _NOT_A_HOST.fullmatch(parent) else None
    return found["host"] if found and not process_names.NOT_A_HOST.match(found["host"]) else ""


def ranks_by_label(origins: Iterable[LineOrigin]) -> Mapping[int, set[int]]:
    """Returns the ranks that appear together with each label on lines that name both."""
    found: dict[int, set[int]] = defaultdict(set)
    for origin in origins:
        if origin.label is not None and origin.rank is not None and not origin.rank_is_label:
            found[origin.label].add(origin.rank)
    return found


def with_exit_rank(origin: LineOrigin, fact: str | None, fields: Mapping[str, str]) -> LineOrigin:
    """Corrects the origin of a launcher's report that a rank ended: if the line has only a label, the origin is the
    reported rank."""
    rank = fields.get("rank", "") if fact in ("exit", "first_failure") else ""
    return replace(origin, rank=int(rank), rank_is_label=False) if origin.rank_is_label and rank.isdigit() else origin


def local_rank_offset(reports: Iterable[Mapping[str, str]]) -> int:
    """Returns by how much the ranks of a torchrun node exceed their local ranks; 0 if no report says it, or several
    nodes report.

    Args:
        reports: Fields of lines, some with `rank` and `local`.
    """
    offsets = {int(each["rank"]) - int(each["local"]) for each in reports if each.get("rank") and each.get("local")}
    return offsets.pop() if len(offsets) == 1 else 0


def label_resolver(known: Mapping[int, set[int]], offset: int = 0) -> Callable[[LineOrigin], LineOrigin]:
    """Returns a function that replaces labels by ranks.

    If no line contradicts it, a label is the rank itself. Otherwise it stands for the only rank that appears with this
    label and with no other; if there is no such rank, the label is kept. A rank that appears with several labels is
    ignored: every process that does not know of the others calls itself rank 0.

    Args:
        known: The result of `ranks_by_label`.
        offset: The result of `local_rank_offset`, for labels that are local ranks.
    """
    label_counts: Counter[int | None] = Counter(rank for ranks in known.values() for rank in ranks)
    unique = {label: {rank for rank in ranks if label_counts[rank] == 1} for label, ranks in known.items()}
    labels_differ = any(ranks - {label} for label, ranks in unique.items())

    def resolve(origin: LineOrigin) -> LineOrigin:
        if origin.label is None:
            return origin
        rank = origin.rank
        if offset and origin.rank_is_label and origin.label == origin.local_rank:
            rank = origin.label + offset
        elif origin.rank_is_label and labels_differ:
            ranks = unique.get(origin.label, set())
            rank = min(ranks) if len(ranks) == 1 else None
        elif not labels_differ and label_counts[rank] > 1:
            rank = origin.label
        return replace(origin, rank=rank, label=None if rank is not None else origin.label, rank_is_label=False)

    return resolve


def with_rank_of_pid(origin: LineOrigin, ranks: Mapping[int, int]) -> LineOrigin:
    """Returns an origin with the rank of its process, if it has none of its own."""
    rank = ranks.get(origin.pid) if origin.rank is None and origin.pid is not None else None
    return origin if rank is None else replace(origin, rank=rank, rank_is_label=False)


def ranks_by_pid(
    reports: Iterable[tuple[LineOrigin, Mapping[str, str]]], origins: Iterable[LineOrigin], *, one_host: bool
) -> dict[int, int]:
    """Returns the rank of each pid.

    Args:
        reports: Origin and fields of the lines of `PLACING_FACTS`. They name rank or local rank; a pid that they do not
            name is that of the line.
        origins: Origins, some with both pid and rank. A pid that several ranks have, on different hosts, is ignored.
        one_host: Whether the job has one host, so that the local rank is the rank.
    """
    fields = [named for origin, each in reports if (named := {"pid": str(origin.pid or ""), **each})["pid"]]
    found = {int(each["pid"]): int(each["rank"]) for each in fields if each.get("rank")}
    ranks_of_pid: dict[int, set[int]] = defaultdict(set)
    for origin in origins:
        if origin.pid is not None and origin.rank is not None:
            ranks_of_pid[origin.pid].add(origin.rank)
    for pid, ranks in ranks_of_pid.items():
        if len(ranks) == 1:
            found.setdefault(pid, min(ranks))
    for each in fields if one_host else ():
        if each.get("local"):
            found.setdefault(int(each["pid"]), int(each["local"]))
    return found
