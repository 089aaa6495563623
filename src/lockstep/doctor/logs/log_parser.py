"""Parses log files: matches rules, extracts tracebacks, progress counters and timestamps."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from lockstep.doctor.knowledge.knowledge_base import FailureRule, KnowledgeBase
from lockstep.doctor.logs import line_origin, log_lines, stack_traces, step_progress
from lockstep.doctor.logs.attempts import earlier_attempts
from lockstep.doctor.logs.clock_alignment import align_clocks, assign_years
from lockstep.doctor.logs.learned_prefix import learn_prefixes
from lockstep.doctor.logs.line_origin import Forms, LineOrigin
from lockstep.doctor.logs.log_lines import (
    MAX_LINE_CHARS,
    Page,
    clean_text,
    count_newlines,
    excerpt,
    numbered_lines,
    rewritten_parts,
    split_pages,
    unwrap_page,
    wrap_width,
)
from lockstep.doctor.logs.log_sources import CollectedSources, open_streams
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch, StepCounter, TailLine
from lockstep.doctor.logs.prefilter import Prefilter
from lockstep.doctor.logs.stack_traces import EXCEPTION_MARKS, TRACEBACK_STARTS, Traceback
from lockstep.doctor.logs.timestamps import TimestampParser, find_year

HEAD_BYTES = 512 << 10
TAIL_BYTES = 1 << 20
"""In the first `HEAD_BYTES` and the last `TAIL_BYTES` of a source, every line is searched for counters and timestamps,
which takes about 15 us per line."""
MIN_BYTES = 4 << 10
TOTAL_BYTES = 16 << 20
"""The limit for all sources together. With many sources, each gets a smaller share, but at least `MIN_BYTES`."""
MATCHES_PER_ORIGIN = 12
"""Number of first matches of a rule that are kept per origin; the last match is kept too."""
MATCHES_PER_RULE = 2_000
LAST_LINES = 24
"""Number of last lines that are kept per rank."""
_LINES_BACK = 12
"""Number of preceding lines that are searched for a timestamp if a line has none."""

_SPAWN_HEADER = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
"""The header that torch.multiprocessing.spawn prints before the traceback of a process."""
_TORCHRUN_RANK = re.compile(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_TORCHRUN_TRACEBACK = re.compile(r"\btraceback : Traceback")
"""The last row for a rank in torchrun's table of failed ranks."""
_IGNORED_EXCEPTION = "Exception ignored in"
"""Python prints this before an exception in a finaliser, after which the process continues."""
_LOGGED = re.compile(r"^.{0,60}\b(?:ERROR|WARN(?:ING)?|EXCEPTION)\b(?!.{0,400}\bTraceback )")
"""A record of a logger. A traceback below it was printed by a handler of the exception, not by the end of a process."""
_INTERLEAVED = re.compile(r"(?:\[(?:rank|default)\d+\]:\s*)+Traceback \(most")
_PROGRESS_BAR = re.compile(r"\d(?:/\d+|[a-z]{2,12}) \[\d[\d:]*(?:<[\d:?]+)?(?:, [^\]]*)?\]\s*(?=\S)")
"""A progress bar followed by other text on the same line."""
_SOURCE_INDENT = "    "
"""Begins the source lines in a traceback, which are not searched for counters: `if step == 11` is none."""


class LogParser:
    """Parses one source."""

    def __init__(self, rules: KnowledgeBase, prefilter: Prefilter, name: str, source: int, sources: int = 1) -> None:
        """Creates a parser.

        Args:
            name: The name of the source.
            source: The number of the source.
            sources: The number of all sources.
        """
        self._rules, self._filter = rules, prefilter
        share = TOTAL_BYTES // max(1, sources)
        self._head_bytes = min(HEAD_BYTES, max(MIN_BYTES, share // 3))
        self._tail_bytes = min(TAIL_BYTES, max(MIN_BYTES, share * 2 // 3))
        origin, node = line_origin.origin_of_file(name)
        self.log = ParsedLog(name, source, origin, node)
        self._clock = TimestampParser()
        self._learned: Forms = ()
        self._width = 0
        self._match_counts: Counter[tuple[str, LineOrigin]] = Counter()
        self._latest: dict[tuple[str, LineOrigin], RuleMatch] = {}
        self._tail_lines: dict[LineOrigin, deque[tuple[int, float | None, str]]] = {}
        self._stamp: tuple[int, float] | None = None
        self._exception_lines: set[int] = set()
        self._served = 0
        self._rising = step_progress.RisingNumbers()

    def read(self, pages: Iterator[Page]) -> ParsedLog:
        """Parses all pages of the source."""
        recent: deque[Page] = deque(maxlen=2)
        for page in pages:
            if page.first == 1:
                head = page.data[: 64 << 10].decode("utf-8", "replace")
                self.log.kind = log_lines.kind_of_file(self.log.name, head[:4096])
                self._clock.year = find_year(head)
                self._width = wrap_width(head)
            page = unwrap_page(page, self._width) if self._width else page
            if page.first == 1:
                self._learned = learn_prefixes(clean_text(raw) for _, raw in numbered_lines(page, 64 << 10))
                if self.log.kind == "stack":
                    lines = ((number, clean_text(raw)) for number, raw in numbered_lines(page))
                    self.log.stacks += stack_traces.parse_stacks(lines, self.log.origin, self.log.name)
                self._examine_head(page)
            for number, start, end in self._filter.candidates(page):
                self._examine_candidate(page, number, start, end)
            recent.append(page)
        self._examine_tail(list(recent))
        found = self.log
        kept = {id(each) for each in found.matches}
        found.matches += [each for each in self._latest.values() if id(each) not in kept]
        found.matches.sort(key=lambda each: each.line)
        found.has_year = bool(self._clock.year)
        reported = [
            line_origin.with_exit_rank(each.origin, each.rule.signature.fact, each.fields) for each in found.matches
        ]
        known = line_origin.ranks_by_label([*found.origins, *reported])
        offset = line_origin.local_rank_offset(each.fields for each in found.matches)
        of_label = line_origin.label_resolver(known, offset)
        placing = [each for each in found.matches if each.rule.signature.fact in line_origin.PLACING_FACTS]
        reports = [(each.origin, each.fields) for each in placing]
        pids = line_origin.ranks_by_pid(reports, map(of_label, found.origins), one_host=False)
        self._resolve_origins(lambda origin: line_origin.with_rank_of_pid(of_label(origin), pids))
        return found

    def _resolve_origins(self, resolve: Callable[[LineOrigin], LineOrigin]) -> None:
        """Replaces launcher labels and pids by ranks, once all lines are known."""
        found = self.log
        found.origins = {resolve(origin): line for origin, line in found.origins.items()}
        found.matches = [replace(each, origin=resolve(each.origin)) for each in found.matches]
        found.counters = [replace(each, origin=resolve(each.origin)) for each in found.counters]
        found.tracebacks = [(resolve(origin), when, traceback) for origin, when, traceback in found.tracebacks]
        for origin, lines in self._tail_lines.items():
            tail = found.tail_lines.setdefault(resolve(origin).rank, [])
            tail += [TailLine(number, when, self._excerpt(line)) for number, when, line in lines]
        found.tail_lines = {
            rank: sorted(lines, key=lambda each: each.line)[-LAST_LINES:] for rank, lines in found.tail_lines.items()
        }

    def _excerpt(self, line: str, at: int = 0) -> str:
        """Returns the text that evidence quotes; of a wrapped line only what was certainly in its first part."""
        return excerpt(line[: self._width * 2 // 3] if self._width else line, at)

    def _examine_head(self, page: Page) -> None:
        for number, raw in numbered_lines(page, self._head_bytes):
            self._examine_edge_line(number, raw)

    def _examine_tail(self, recent: list[Page]) -> None:
        """Examines the lines in the last `TAIL_BYTES`, except those that were examined with the head."""
        if not recent:
            return
        last = recent[-1]
        self.log.lines = last.first + last.newlines - last.data.endswith(b"\n")
        left = self._tail_bytes
        windows: list[Page] = []
        for page in reversed(recent):
            start = max(0, len(page.data) - left, self._head_bytes if page.first == 1 else 0)
            if start >= len(page.data):
                continue
            start = page.data.find(b"\n", start - 1) + 1 if start else 0
            if start < len(page.data):
                data = page.data[start:]
                windows.append(Page(data, page.first + page.newlines - count_newlines(data)))
                left -= len(data)
            if left <= 0:
                break
        for page in reversed(windows):
            for number, raw in numbered_lines(page):
                self._examine_edge_line(number, raw)

    def _examine_edge_line(self, number: int, raw: bytes) -> None:
        """Examines all parts of a line near an end of the file, and keeps the line if it is one of the rank's last."""
        *before, last = rewritten_parts(raw)
        for each in before:
            self._examine_line(number, clean_text(each))
        line = clean_text(last)
        origin, when = self._examine_line(number, line)
        if line and not line.isspace():
            rank_of = origin if origin.rank is not None or self.log.origin.rank is None else self.log.origin
            local = rank_of.local_rank if rank_of.rank_is_label else None
            pid = rank_of.pid if rank_of.rank is None else None
            key = LineOrigin(rank_of.rank, "", "", pid, local, rank_of.label, rank_of.rank_is_label)
            lines = self._tail_lines.get(key)
            if lines is None:
                lines = self._tail_lines[key] = deque(maxlen=LAST_LINES)
            lines.append((number, when, line))

    def _examine_line(self, number: int, line: str) -> tuple[LineOrigin, float | None]:
        """Records origin, timestamp and counter of a line; returns origin and timestamp."""
        prefix = line_origin.parse_prefixes(line, self._clock, self._learned)
        found = self.log
        if prefix.when is not None:
            found.first = prefix.when if found.first is None else found.first
            found.last = prefix.when
            found.dated_lines = found.dated_lines[0] or number, number
            self._stamp = number, prefix.when
        origin = prefix.origin
        if origin:
            found.origins[origin] = number
        when = prefix.when if prefix.when is not None else self._stamp[1] if self._stamp else None
        counter = None if line.startswith(_SOURCE_INDENT, prefix.at) else step_progress.parse_step(line)
        if counter is None and step_progress.serves(line):
            self._served += 1
            counter = 0, self._served, 0, False
        if counter is None and found.kind == "log" and line[prefix.at : prefix.at + 1].strip():
            counter = self._rising.count(line[prefix.at :])
        if counter is not None:
            rank = origin if origin.rank is not None else _with_rank(origin, line_origin.mentioned_rank(line))
            found.counters.append(StepCounter(rank.with_defaults(found.origin), number, when, *counter))
        return origin, when

    def _examine_candidate(self, page: Page, number: int, start: int, end: int) -> None:
        """Matches rules and exceptions with a line that the prefilter selected."""
        line = clean_text(page.data[start:end])
        texts = self._filter.texts(line)
        prefix = _parse_line_end(line, self._clock, self._learned)
        origin = prefix.origin.with_defaults(self.log.origin)
        rules = {rule.id: rule for each in texts for rule in self._rules.by_literal.get(each, ())}
        when: float | None = prefix.when
        for rule in rules.values():
            if self.log.counts[rule.id] < MATCHES_PER_RULE or self._match_counts[rule.id, origin] < MATCHES_PER_ORIGIN:
                self._match(rule, page, number, start, line, prefix.at, origin, when)
        at = next((at for each in stack_traces.TRACEBACK_STARTS if (at := line.find(each)) >= 0), None)
        if at is not None and not self._is_quoted(page, start, line, at, prefix.at):
            self._add_traceback(page, number, start, line, origin, when)
        elif number not in self._exception_lines and any(each in texts for each in stack_traces.EXCEPTION_MARKS):
            found = stack_traces.parse_lone_exception(number, line[prefix.at :])
            is_failure = found is not None and (prefix.origin.rank is not None or stack_traces.is_primary(found))
            if found is not None and is_failure and not self._is_quoted(page, start, line, prefix.at, prefix.at):
                self._add_exception(found, origin, self._time_before(page, start) if when is None else when)

    def _match(self, rule: FailureRule, page: Page, number: int, start: int, line: str, begin: int, origin: LineOrigin,
               when: float | None) -> None:  # fmt: skip
        kinds, role = rule.signature.kinds, rule.signature.role
        if kinds and log_lines.kind_of_line(self.log.kind, line) not in kinds:
            return
        text = line
        if rule.signature.lines > 1:
            text = "\n".join(each for _, each in self._lines_of_origin(page, number, start, rule.signature.lines))
        found = rule.match(text)
        if found is None or log_lines.is_overcome(line, role):
            return
        when = self._time_before(page, start) if when is None else when
        at = found.start()
        before = text.count("\n", 0, at)
        if before:
            number, line, at = number + before, text.split("\n")[before], 0
        elif log_lines.is_supposition(line, at) or self._is_quoted(
            page, start, line, at if at > begin else min(found.end(), len(line)), begin
        ):
            return
        match = RuleMatch(rule, origin, when, self.log.name, self.log.source, number, self._excerpt(line, at),
                        rule.fields(found))  # fmt: skip
        self._add_match(match)

    def _is_quoted(self, page: Page, start: int, line: str, at: int, begin: int) -> bool:
        """Whether position `at` of a line is part of a printed sample.

        Args:
            start: The byte of the page at which the line starts.
            begin: The position in the line at which its message begins.
        """
        if log_lines.is_quoted(line, at, begin):
            return True
        data = page.data
        mark = log_lines.sample_start(
            data[max(0, start - log_lines.SAMPLE_BYTES) : start], data[start : start + log_lines.SAMPLE_BYTES]
        )
        return (
            mark is not None
            and line_origin.parse_prefixes(clean_text(mark), TimestampParser(), self._learned).origin
            == line_origin.parse_prefixes(line, TimestampParser(), self._learned).origin
        )

    def _add_match(self, match: RuleMatch) -> None:
        key = match.rule.id, match.origin
        self.log.counts[match.rule.id] += 1
        self._match_counts[key] += 1
        if self._match_counts[key] <= MATCHES_PER_ORIGIN:
            self.log.matches.append(match)
        self._latest[key] = match

    def _add_traceback(
        self, page: Page, number: int, start: int, line: str, origin: LineOrigin, when: float | None
    ) -> None:
        escaped = stack_traces.escaped_traceback(number, line)
        found = stack_traces.parse_traceback(escaped or self._lines_of_origin(page, number, start, 200))
        if found is None or len(self.log.tracebacks) >= MATCHES_PER_RULE or found.number in self._exception_lines:
            return
        self._exception_lines.add(found.number)
        when = self._time_before(page, start) if when is None else when
        before = clean_text(page.data[page.data.rfind(b"\n", 0, max(0, start - 1)) + 1 : start])
        if _IGNORED_EXCEPTION in before:
            return
        one_of_several = origin.rank is not None or origin.pid is not None or bool(origin.role)
        logged = _LOGGED.search(before) is not None or stack_traces.UNHANDLED_TASK in line
        found = replace(found, logged=logged and not one_of_several)
        about = _SPAWN_HEADER.match(before) or _torchrun_rank(page.data[max(0, start - 1000) : start], line)
        if about and (origin.rank is None or origin.rank_is_label):
            origin = _with_rank(origin, int(about["rank"]))
        self._add_exception(found, origin, when)

    def _add_exception(self, found: Traceback, origin: LineOrigin, when: float | None) -> None:
        """Adds an exception, and the matches of rules for exceptions."""
        found = replace(found, text=self._excerpt(found.text))
        self.log.tracebacks.append((origin, when, found))
        text = f"{found.type}: {found.message}"
        frames = "\n".join(str(each) for each in found.frames)
        for rule in self._rules.exceptions:
            if rule.frames is not None and not rule.frames.search(frames):
                continue
            match = rule.match(text)
            if match is not None:
                fields = {"where": found.where, "exception": found.type, "ip": found.ip, **rule.fields(match)}
                if found.pid is not None:
                    fields.setdefault("pid", str(found.pid))
                self._add_match(RuleMatch(rule, origin, when, self.log.name, self.log.source, found.number,
                                    found.text, fields, found))  # fmt: skip

    def _lines_of_origin(self, page: Page, number: int, start: int, most: int) -> list[tuple[int, str]]:
        """Returns the line at `start` and the following lines of the same origin, without their prefixes."""
        collected: list[tuple[int, str]] = []
        own = None
        misses = 0
        data, at = page.lookahead(start), 0
        while at < len(data) and len(collected) < most and misses < 400:
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            pieces = rewritten_parts(data[at:end])
            line = clean_text(pieces[0] if own is None else pieces[-1])
            part = (
                _parse_line_end(line, TimestampParser(), self._learned)
                if own is None
                else line_origin.parse_prefixes(line, TimestampParser(), self._learned)
            )
            if own is None:
                own = part.origin
            if part.origin == own or (not misses and _has_no_origin(part.origin, own)):
                collected.append((number, line[part.at :] if part.origin or not own else line))
            else:
                misses += 1
            at, number = end + 1, number + 1
        return collected

    def _time_before(self, page: Page, start: int) -> float | None:
        """Returns the nearest timestamp before a line; None if none of the `_LINES_BACK` preceding lines has one."""
        end = start - 1
        for _ in range(_LINES_BACK):
            if end <= 0:
                return None
            floor = max(0, end - MAX_LINE_CHARS)
            begin = page.data.rfind(b"\n", floor, end) + 1 or floor
            when = self._clock.read(clean_text(page.data[begin : min(end, begin + 400)]))
            if when is not None:
                return when
            end = begin - 1
        return None


def _parse_line_end(line: str, clock: TimestampParser, learned: Forms) -> line_origin.ParsedPrefix:
    """Parses the prefixes of a line that may begin with a progress bar or an unfinished line of another thread."""
    interleaved = _INTERLEAVED.search(line)
    cut = interleaved.start() if interleaved else max((each.end() for each in _PROGRESS_BAR.finditer(line)), default=0)
    if not cut:
        return line_origin.parse_prefixes(line, clock, learned)
    end, start = (line_origin.parse_prefixes(each, clock, learned) for each in (line[cut:], line))
    if start.at >= cut + end.at:
        return start
    origin = end.origin or start.origin
    return line_origin.ParsedPrefix(origin, max(cut + end.at, start.at), start.when if end.when is None else end.when)


def _has_no_origin(origin: LineOrigin, own: LineOrigin) -> bool:
    """Whether a line may continue the previous one: its prefixes name no origin, or only the launcher's label."""
    return not origin or (origin.rank_is_label and origin.label == own.label and origin.host == own.host)


def _torchrun_rank(before: bytes, line: str) -> re.Match[str] | None:
    """Finds the rank whose traceback begins in this line of torchrun's summary."""
    if not _TORCHRUN_TRACEBACK.search(line):
        return None
    return next(iter([*_TORCHRUN_RANK.finditer(before.decode("utf-8", "replace"))][-1:]), None)


def _with_rank(origin: LineOrigin, rank: int | None) -> LineOrigin:
    return origin if rank is None else replace(origin, rank=rank, rank_is_label=False)


def parse_logs(
    found: CollectedSources, rules: KnowledgeBase, progress: Callable[[int, int, int], None] | None = None
) -> list[ParsedLog]:
    """Parses all sources, aligns their clocks and assigns missing years.

    Args:
        progress: Called after each source with the sources read, their number, and the bytes read.
    """
    prefilter = Prefilter([*rules.by_literal, *TRACEBACK_STARTS, *EXCEPTION_MARKS])
    many, size = len(found.sources), 0
    logs = []
    for number, (source, blocks) in enumerate(open_streams(found.sources, found.gaps)):
        logs.append(LogParser(rules, prefilter, source.name, number, many).read(split_pages(blocks)))
        size += source.size
        if progress is not None:
            progress(number + 1, many, size)
    assign_years(logs)
    old = earlier_attempts(logs)
    align_clocks([each for each in logs if each.source not in old])
    return logs
