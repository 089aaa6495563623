"""Parses log files: matches rules, extracts tracebacks, progress counters and timestamps."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from lockstep.doctor.knowledge.knowledge_base import FailureRule, KnowledgeBase
from lockstep.doctor.logs import line_origin, log_lines, rank_resolver, stack_traces, step_progress
from lockstep.doctor.logs.attempts import earlier_attempts
from lockstep.doctor.logs.clock_alignment import align_clocks, assign_years
from lockstep.doctor.logs.line_origin import LineOrigin
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
from lockstep.doctor.logs.parsed_log import ParsedLog, ProgressTick, RuleMatch, TailLine
from lockstep.doctor.logs.prefilter import Prefilter
from lockstep.doctor.logs.stack_traces import EXCEPTION_MARKS, TRACEBACK_STARTS, Traceback
from lockstep.doctor.logs.timestamps import TimestampParser, find_year

HEAD_BYTES = 512 << 10
TAIL_BYTES = 1 << 20
"""Bytes at both ends of a source of which each line is looked at, for counters and times: some 15 us each."""
MIN_BYTES = 4 << 10
TOTAL_BYTES = 16 << 20
"""Of all sources together; of many each has a smaller part, `MIN_BYTES` at the least."""
MATCHES_PER_ORIGIN = 12
"""Sightings of one rule by one speaker that are kept from the start; of later ones the last."""
MATCHES_PER_RULE = 2_000
LAST_LINES = 12
"""Lines of each rank that are kept from the end."""
_LINES_BACK = 12
"""Lines before a line without a time in which one is looked for."""

_SPAWN_HEADER = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
"""What torch.multiprocessing.spawn puts before the traceback of a process."""
_TORCHRUN_RANK = re.compile(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_TORCHRUN_TRACEBACK = re.compile(r"\btraceback : Traceback")
"""torchrun's table of those who failed, whose last row is the traceback of a rank."""
_IGNORED_EXCEPTION = "Exception ignored in"
"""What Python puts before the traceback of a finaliser, after which it goes on."""
_INTERLEAVED = re.compile(r"(?:\[(?:rank|default)\d+\]:\s*)+Traceback \(most")
_PROGRESS_BAR = re.compile(r"\d(?:/\d+|[a-z]{2,12}) \[\d[\d:]*(?:<[\d:?]+)?(?:, [^\]]*)?\]\s*(?=\S)")
"""A progress bar that something follows on."""
_SOURCE_INDENT = "    "
"""Source in a traceback: `if step == 11` is no counter."""


class LogParser:
    """Reads one source."""

    def __init__(self, rules: KnowledgeBase, prefilter: Prefilter, name: str, source: int, sources: int = 1) -> None:
        """`sources` are all that there are."""
        self._rules, self._filter = rules, prefilter
        share = TOTAL_BYTES // max(1, sources)
        self._head_bytes = min(HEAD_BYTES, max(MIN_BYTES, share // 3))
        self._tail_bytes = min(TAIL_BYTES, max(MIN_BYTES, share * 2 // 3))
        who, node = line_origin.origin_of_file(name)
        self.reading = ParsedLog(name, source, who, node)
        self._clock = TimestampParser()
        self._width = 0
        self._kept: Counter[tuple[str, LineOrigin]] = Counter()
        self._latest: dict[tuple[str, LineOrigin], RuleMatch] = {}
        self._said: dict[LineOrigin, deque[tuple[int, float | None, str]]] = {}
        self._stamp: tuple[int, float] | None = None
        self._raised: set[int] = set()
        self._skip_to: dict[LineOrigin, int] = {}

    def read(self, pages: Iterator[Page]) -> ParsedLog:
        recent: deque[Page] = deque(maxlen=2)
        for page in pages:
            if page.first == 1:
                head = page.data[: 64 << 10].decode("utf-8", "replace")
                self.reading.kind = log_lines.kind_of_file(self.reading.name, head[:4096])
                self._clock.year = find_year(head)
                self._width = wrap_width(head)
            page = unwrap_page(page, self._width) if self._width else page
            if page.first == 1:
                if self.reading.kind == "stack":
                    whole = ((number, clean_text(raw)) for number, raw in numbered_lines(page))
                    self.reading.stacks += stack_traces.parse_stacks(whole, self.reading.who, self.reading.name)
                self._head(page)
            for number, start, end in self._filter.candidates(page):
                self._candidate(page, number, start, end)
            recent.append(page)
        self._tail(list(recent))
        found = self.reading
        kept = {id(each) for each in found.sightings}
        found.sightings += [each for each in self._latest.values() if id(each) not in kept]
        found.sightings.sort(key=lambda each: each.line)
        found.dated = bool(self._clock.year)
        told = [
            rank_resolver.with_exit_rank(each.who, each.rule.signature.fact, each.fields) for each in found.sightings
        ]
        self._settle(rank_resolver.label_resolver(rank_resolver.ranks_by_label([*found.speakers, *told])))
        return found

    def _settle(self, settle: Callable[[LineOrigin], LineOrigin]) -> None:
        """Decides which labels are ranks, now that all lines are known."""
        found = self.reading
        found.speakers = {settle(who): line for who, line in found.speakers.items()}
        found.sightings = [replace(each, who=settle(each.who)) for each in found.sightings]
        found.ticks = [replace(each, who=settle(each.who)) for each in found.ticks]
        found.tracebacks = [(settle(who), when, traceback) for who, when, traceback in found.tracebacks]
        for who, lines in self._said.items():
            said = found.said.setdefault(settle(who).rank, [])
            said += [TailLine(number, when, self._shown(line)) for number, when, line in lines]
        found.said = {
            rank: sorted(lines, key=lambda each: each.line)[-LAST_LINES:] for rank, lines in found.said.items()
        }

    def _shown(self, line: str, at: int = 0) -> str:
        """What evidence cites of a line: of a broken one what surely stands in its first part."""
        return excerpt(line[: self._width * 2 // 3] if self._width else line, at)

    def _head(self, page: Page) -> None:
        for number, raw in numbered_lines(page, self._head_bytes):
            self._window(number, raw)

    def _tail(self, recent: list[Page]) -> None:
        if not recent:
            return
        last = recent[-1]
        self.reading.lines = last.first + last.newlines
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
                self._window(number, raw)

    def _window(self, number: int, raw: bytes) -> None:
        """A line near one of the ends, or what is left of its parts: who speaks, the time, counters, the last words."""
        *before, last = rewritten_parts(raw)
        for each in before:
            self._look(number, clean_text(each))
        line = clean_text(last)
        who, when = self._look(number, line)
        if line and not line.isspace():
            rank_of = who if who.rank is not None else self.reading.who
            key = LineOrigin(rank_of.rank, label=rank_of.label, guessed=rank_of.guessed)
            lines = self._said.get(key)
            if lines is None:
                lines = self._said[key] = deque(maxlen=LAST_LINES)
            lines.append((number, when, line))

    def _look(self, number: int, line: str) -> tuple[LineOrigin, float | None]:
        """Who says it and when."""
        said = line_origin.parse_prefixes(line, self._clock)
        found = self.reading
        if said.when is not None:
            found.first = said.when if found.first is None else found.first
            found.last = said.when
            found.dated_lines = found.dated_lines[0] or number, number
            self._stamp = number, said.when
        who = said.who
        if who:
            found.speakers[who] = number
        when = said.when if said.when is not None else self._stamp[1] if self._stamp else None
        tick = None if line.startswith(_SOURCE_INDENT, said.at) else step_progress.parse_step(line)
        if tick is not None:
            rank = who if who.rank is not None else _with_rank(who, line_origin.mentioned_rank(line))
            found.ticks.append(ProgressTick(rank.over(found.who), number, when, *tick))
        return who, when

    def _candidate(self, page: Page, number: int, start: int, end: int) -> None:
        line = clean_text(page.data[start:end])
        texts = self._filter.texts(line)
        said = _parse_line_end(line, self._clock)
        who = said.who.over(self.reading.who)
        rules = {rule.id: rule for each in texts for rule in self._rules.by_literal.get(each, ())}
        when: float | None = said.when
        for rule in rules.values():
            if self.reading.counts[rule.id] < MATCHES_PER_RULE or self._kept[rule.id, who] < MATCHES_PER_ORIGIN:
                self._match(rule, page, number, start, line, said.at, who, when)
        at = next((at for each in stack_traces.TRACEBACK_STARTS if (at := line.find(each)) >= 0), None)
        if at is not None and not self._quoted(page, start, line, at, said.at):
            self._traceback(page, number, start, line, who, when)
        elif number not in self._raised and any(each in texts for each in stack_traces.EXCEPTION_MARKS):
            found = stack_traces.parse_lone_exception(number, line[said.at :])
            telling = found is not None and (said.who.rank is not None or stack_traces.is_primary(found))
            if found is not None and telling and not self._quoted(page, start, line, said.at, said.at):
                self._raise(found, who, self._before(page, start) if when is None else when)

    def _match(self, rule: FailureRule, page: Page, number: int, start: int, line: str, begin: int, who: LineOrigin,
               when: float | None) -> None:  # fmt: skip
        wanted = rule.signature.kinds
        if wanted and log_lines.kind_of_line(self.reading.kind, line) not in wanted:
            return
        whole = line
        if rule.signature.lines > 1:
            whole = "\n".join(said for _, said in self._speech(page, number, start, rule.signature.lines))
        found = rule.match(whole)
        if found is None:
            return
        when = self._before(page, start) if when is None else when
        at = found.start()
        before = whole.count("\n", 0, at)
        if before:
            number, line, at = number + before, whole.split("\n")[before], 0
        elif log_lines.is_supposition(line, at) or self._quoted(
            page, start, line, at if at > begin else min(found.end(), len(line)), begin
        ):
            return
        seen = RuleMatch(rule, who, when, self.reading.name, self.reading.source, number, self._shown(line, at),
                        rule.fields(found))  # fmt: skip
        self._keep(seen)

    def _quoted(self, page: Page, start: int, line: str, at: int, begin: int) -> bool:
        """Whether what a line says is part of a sample that is printed."""
        if log_lines.is_quoted(line, at, begin):
            return True
        data = page.data
        mark = log_lines.sample_start(
            data[max(0, start - log_lines.SAMPLE_BYTES) : start], data[start : start + log_lines.SAMPLE_BYTES]
        )
        return (
            mark is not None
            and line_origin.parse_prefixes(clean_text(mark), TimestampParser()).who
            == line_origin.parse_prefixes(line, TimestampParser()).who
        )

    def _keep(self, seen: RuleMatch) -> None:
        key = seen.rule.id, seen.who
        self.reading.counts[seen.rule.id] += 1
        self._kept[key] += 1
        if self._kept[key] <= MATCHES_PER_ORIGIN:
            self.reading.sightings.append(seen)
        self._latest[key] = seen

    def _traceback(self, page: Page, number: int, start: int, line: str, who: LineOrigin, when: float | None) -> None:
        found = stack_traces.parse_traceback(self._speech(page, number, start, 200))
        if found is None or len(self.reading.tracebacks) >= MATCHES_PER_RULE or found.number in self._raised:
            return
        self._raised.add(found.number)
        when = self._before(page, start) if when is None else when
        before = clean_text(page.data[page.data.rfind(b"\n", 0, max(0, start - 1)) + 1 : start])
        if _IGNORED_EXCEPTION in before:
            return
        about = _SPAWN_HEADER.match(before) or _torchrun_rank(page.data[max(0, start - 1000) : start], line)
        if about and (who.rank is None or who.guessed):
            who = _with_rank(who, int(about["rank"]))
        self._raise(found, who, when)

    def _raise(self, found: Traceback, who: LineOrigin, when: float | None) -> None:
        """Keeps an exception, and what the rules say of it."""
        found = replace(found, text=self._shown(found.text))
        self.reading.tracebacks.append((who, when, found))
        whole = f"{found.type}: {found.message}"
        frames = "\n".join(str(each) for each in found.frames)
        for rule in self._rules.exceptions:
            if rule.frames is not None and not rule.frames.search(frames):
                continue
            match = rule.match(whole)
            if match is not None:
                fields = {"where": found.where, "exception": found.type, "ip": found.ip, **rule.fields(match)}
                self._keep(RuleMatch(rule, who, when, self.reading.name, self.reading.source, found.number,
                                    found.text, fields, found))  # fmt: skip

    def _speech(self, page: Page, number: int, start: int, most: int) -> list[tuple[int, str]]:
        """The line at `run_training` and what the same speaker says next, prefixes taken off."""
        said: list[tuple[int, str]] = []
        own = None
        misses = 0
        data, at = page.onwards(start), 0
        while at < len(data) and len(said) < most and misses < 400:
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            seen = rewritten_parts(data[at:end])
            line = clean_text(seen[0] if own is None else seen[-1])
            part = (
                _parse_line_end(line, TimestampParser())
                if own is None
                else line_origin.parse_prefixes(line, TimestampParser())
            )
            if own is None:
                own = part.who
            if part.who == own or (not misses and _has_no_origin(part.who, own)):
                said.append((number, line[part.at :] if part.who or not own else line))
            else:
                misses += 1
            at, number = end + 1, number + 1
        return said

    def _before(self, page: Page, start: int) -> float | None:
        """The time of the nearest line before that has one."""
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


def _parse_line_end(line: str, clock: TimestampParser) -> line_origin.ParsedPrefix:
    """Who says the end of a line, where that follows on a progress bar or on what another thread had not ended."""
    glued = _INTERLEAVED.search(line)
    cut = glued.start() if glued else max((each.end() for each in _PROGRESS_BAR.finditer(line)), default=0)
    if not cut:
        return line_origin.parse_prefixes(line, clock)
    last, whole = line_origin.parse_prefixes(line[cut:], clock), line_origin.parse_prefixes(line, clock)
    if whole.at >= cut + last.at:
        return whole
    who = last.who or whole.who
    return line_origin.ParsedPrefix(who, max(cut + last.at, whole.at), whole.when if last.when is None else last.when)


def _has_no_origin(who: LineOrigin, own: LineOrigin) -> bool:
    """Whether a line may go on what another one said: it has no name, or its launcher's label only."""
    return not who or (who.guessed and who.label == own.label and who.host == own.host)


def _torchrun_rank(before: bytes, line: str) -> re.Match[str] | None:
    """The rank whose traceback a line of torchrun's summary begins."""
    if not _TORCHRUN_TRACEBACK.search(line):
        return None
    return next(iter([*_TORCHRUN_RANK.finditer(before.decode("utf-8", "replace"))][-1:]), None)


def _with_rank(who: LineOrigin, rank: int | None) -> LineOrigin:
    return who if rank is None else replace(who, rank=rank, guessed=False)


def parse_logs(found: CollectedSources, rules: KnowledgeBase) -> list[ParsedLog]:
    """All sources, one after the other."""
    prefilter = Prefilter([*rules.by_literal, *TRACEBACK_STARTS, *EXCEPTION_MARKS])
    many = len(found.sources)
    readings = [LogParser(rules, prefilter, source.name, number, many).read(split_pages(blocks))
                for number, (source, blocks) in enumerate(open_streams(found.sources, found.gaps))]  # fmt: skip
    assign_years(readings)
    old = earlier_attempts(readings)
    align_clocks([each for each in readings if each.source not in old])
    return readings
