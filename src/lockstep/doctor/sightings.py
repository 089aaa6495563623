"""What was seen in one source: matches of rules with who said them and when, tracebacks, counters, times."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from lockstep.doctor import kinds, labels, prefixes, progress, quotes, stacks, tracebacks
from lockstep.doctor.filter import Filter
from lockstep.doctor.lines import LONGEST, Page, count, numbered, parts, shown, text, unwrapped, wrapped_at
from lockstep.doctor.prefixes import NOBODY, Who
from lockstep.doctor.rules import Rule, Rules
from lockstep.doctor.stacks import Stack
from lockstep.doctor.times import Clock, year_in
from lockstep.doctor.tracebacks import Traceback

HEAD = 512 << 10
TAIL = 1 << 20
"""Bytes at both ends of a source of which each line is looked at, for counters and times: some 15 us each."""
LEAST = 4 << 10
LOOKED_AT = 16 << 20
"""Of all sources together; of many each has a smaller part, `LEAST` at the least."""
PER_SPEAKER = 12
"""Sightings of one rule by one speaker that are kept from the start; of later ones the last."""
PER_RULE = 2_000
LAST = 12
"""Lines of each rank that are kept from the end."""
_BACK = 12
"""Lines before a line without a time in which one is looked for."""

_SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
"""What torch.multiprocessing.spawn puts before the traceback of a process."""
_SUMMARY = re.compile(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)")
_OF_SUMMARY = re.compile(r"\btraceback : Traceback")
"""torchrun's table of those who failed, whose last row is the traceback of a rank."""
_IGNORED = "Exception ignored in"
"""What Python puts before the traceback of a finaliser, after which it goes on."""
_GLUED = re.compile(r"(?:\[(?:rank|default)\d+\]:\s*)+Traceback \(most")
_BAR = re.compile(r"\d(?:/\d+|[a-z]{2,12}) \[\d[\d:]*(?:<[\d:?]+)?(?:, [^\]]*)?\]\s*(?=\S)")
"""A progress bar that something follows on."""
_CODE = "    "
"""Source in a traceback: `if step == 11` is no counter."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A rule matched.

    Attributes:
        who: The speaker, with what the file's name adds.
        when: Seconds since 1970 on the clock of the file; None where nothing near has a time.
        file: Name of the source.
        source: Number of the source, in the order in which they were given.
        line: Number of the line.
        fields: Named groups.
    """

    rule: Rule
    who: Who
    when: float | None
    file: str
    source: int
    line: int
    text: str
    fields: Mapping[str, str]
    traceback: Traceback | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.source, self.line


@dataclass(frozen=True, slots=True)
class Tick:
    """A counter of progress on a line."""

    who: Who
    line: int
    when: float | None
    epoch: int
    step: int
    of: int
    bar: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """A line near the end of a file."""

    line: int
    when: float | None
    text: str


@dataclass
class Reading:
    """Of one source all that was seen."""

    name: str
    source: int
    who: Who = NOBODY
    node: int | None = None
    lines: int = 0
    kind: str = "log"
    """See `kinds`."""
    first: float | None = None
    last: float | None = None
    dated_lines: tuple[int, int] = (0, 0)
    """The first and the last line with a time of its own, as far as they were looked at."""
    sightings: list[Sighting] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    tracebacks: list[tuple[Who, float | None, Traceback]] = field(default_factory=list)
    speakers: dict[Who, int] = field(default_factory=dict)
    """Who speaks, and the last line in which."""
    said: dict[int | None, list["Said"]] = field(default_factory=dict)
    """By rank, its last lines."""
    stacks: list[Stack] = field(default_factory=list)
    dated: bool = False
    """Some line names the year."""
    counts: Counter[str] = field(default_factory=Counter)
    """By rule, how often."""


class Reader:
    """Reads one source."""

    def __init__(self, rules: Rules, prefilter: Filter, name: str, source: int, sources: int = 1) -> None:
        """`sources` are all that there are."""
        self._rules, self._filter = rules, prefilter
        share = LOOKED_AT // max(1, sources)
        self._head_bytes = min(HEAD, max(LEAST, share // 3))
        self._tail_bytes = min(TAIL, max(LEAST, share * 2 // 3))
        who, node = prefixes.of_file(name)
        self.reading = Reading(name, source, who, node)
        self._clock = Clock()
        self._width = 0
        self._kept: Counter[tuple[str, Who]] = Counter()
        self._latest: dict[tuple[str, Who], Sighting] = {}
        self._said: dict[Who, deque[tuple[int, float | None, str]]] = {}
        self._stamp: tuple[int, float] | None = None
        self._raised: set[int] = set()
        self._skip_to: dict[Who, int] = {}

    def read(self, pages: Iterator[Page]) -> Reading:
        recent: deque[Page] = deque(maxlen=2)
        for page in pages:
            if page.first == 1:
                head = page.data[: 64 << 10].decode("utf-8", "replace")
                self.reading.kind = kinds.of_file(self.reading.name, head[:4096])
                self._clock.year = year_in(head)
                self._width = wrapped_at(head)
            page = unwrapped(page, self._width) if self._width else page
            if page.first == 1:
                if self.reading.kind == "stack":
                    whole = ((number, text(raw)) for number, raw in numbered(page))
                    self.reading.stacks += stacks.read(whole, self.reading.who, self.reading.name)
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
        told = [labels.told(each.who, each.rule.signature.fact, each.fields) for each in found.sightings]
        self._settle(labels.settled(labels.pairs([*found.speakers, *told])))
        return found

    def _settle(self, settle: Callable[[Who], Who]) -> None:
        """Decides which labels are ranks, now that all lines are known."""
        found = self.reading
        found.speakers = {settle(who): line for who, line in found.speakers.items()}
        found.sightings = [replace(each, who=settle(each.who)) for each in found.sightings]
        found.ticks = [replace(each, who=settle(each.who)) for each in found.ticks]
        found.tracebacks = [(settle(who), when, traceback) for who, when, traceback in found.tracebacks]
        for who, lines in self._said.items():
            said = found.said.setdefault(settle(who).rank, [])
            said += [Said(number, when, self._shown(line)) for number, when, line in lines]
        found.said = {rank: sorted(lines, key=lambda each: each.line)[-LAST:] for rank, lines in found.said.items()}

    def _shown(self, line: str, at: int = 0) -> str:
        """What evidence cites of a line: of a broken one what surely stands in its first part."""
        return shown(line[: self._width * 2 // 3] if self._width else line, at)

    def _head(self, page: Page) -> None:
        for number, raw in numbered(page, self._head_bytes):
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
                windows.append(Page(data, page.first + page.newlines - count(data)))
                left -= len(data)
            if left <= 0:
                break
        for page in reversed(windows):
            for number, raw in numbered(page):
                self._window(number, raw)

    def _window(self, number: int, raw: bytes) -> None:
        """A line near one of the ends, or what is left of its parts: who speaks, the time, counters, the last words."""
        *before, last = parts(raw)
        for each in before:
            self._look(number, text(each))
        line = text(last)
        who, when = self._look(number, line)
        if line and not line.isspace():
            rank_of = who if who.rank is not None else self.reading.who
            key = Who(rank_of.rank, label=rank_of.label, guessed=rank_of.guessed)
            lines = self._said.get(key)
            if lines is None:
                lines = self._said[key] = deque(maxlen=LAST)
            lines.append((number, when, line))

    def _look(self, number: int, line: str) -> tuple[Who, float | None]:
        """Who says it and when."""
        said = prefixes.read(line, self._clock)
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
        tick = None if line.startswith(_CODE, said.at) else progress.counted(line)
        if tick is not None:
            rank = who if who.rank is not None else _with_rank(who, prefixes.mentioned(line))
            found.ticks.append(Tick(rank.over(found.who), number, when, *tick))
        return who, when

    def _candidate(self, page: Page, number: int, start: int, end: int) -> None:
        line = text(page.data[start:end])
        texts = self._filter.texts(line)
        said = _speaker(line, self._clock)
        who = said.who.over(self.reading.who)
        rules = {rule.id: rule for each in texts for rule in self._rules.by_literal.get(each, ())}
        when: float | None = said.when
        for rule in rules.values():
            if self.reading.counts[rule.id] < PER_RULE or self._kept[rule.id, who] < PER_SPEAKER:
                self._match(rule, page, number, start, line, said.at, who, when)
        at = next((at for each in tracebacks.STARTS if (at := line.find(each)) >= 0), None)
        if at is not None and not self._quoted(page, start, line, at, said.at):
            self._traceback(page, number, start, line, who, when)
        elif number not in self._raised and any(each in texts for each in tracebacks.LAST):
            found = tracebacks.alone(number, line[said.at :])
            telling = found is not None and (said.who.rank is not None or tracebacks.own(found))
            if found is not None and telling and not self._quoted(page, start, line, said.at, said.at):
                self._raise(found, who, self._before(page, start) if when is None else when)

    def _match(self, rule: Rule, page: Page, number: int, start: int, line: str, begin: int, who: Who,
               when: float | None) -> None:  # fmt: skip
        wanted = rule.signature.kinds
        if wanted and kinds.of_line(self.reading.kind, line) not in wanted:
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
        elif quotes.supposed(line, at) or self._quoted(
            page, start, line, at if at > begin else min(found.end(), len(line)), begin
        ):
            return
        seen = Sighting(rule, who, when, self.reading.name, self.reading.source, number, self._shown(line, at),
                        rule.fields(found))  # fmt: skip
        self._keep(seen)

    def _quoted(self, page: Page, start: int, line: str, at: int, begin: int) -> bool:
        """Whether what a line says is part of a sample that is printed."""
        if quotes.quoted(line, at, begin):
            return True
        data = page.data
        mark = quotes.opened(data[max(0, start - quotes.NEAR) : start], data[start : start + quotes.NEAR])
        return mark is not None and prefixes.read(text(mark), Clock()).who == prefixes.read(line, Clock()).who

    def _keep(self, seen: Sighting) -> None:
        key = seen.rule.id, seen.who
        self.reading.counts[seen.rule.id] += 1
        self._kept[key] += 1
        if self._kept[key] <= PER_SPEAKER:
            self.reading.sightings.append(seen)
        self._latest[key] = seen

    def _traceback(self, page: Page, number: int, start: int, line: str, who: Who, when: float | None) -> None:
        found = tracebacks.assemble(self._speech(page, number, start, 200))
        if found is None or len(self.reading.tracebacks) >= PER_RULE or found.number in self._raised:
            return
        self._raised.add(found.number)
        when = self._before(page, start) if when is None else when
        before = text(page.data[page.data.rfind(b"\n", 0, max(0, start - 1)) + 1 : start])
        if _IGNORED in before:
            return
        about = _SPAWNED.match(before) or _summarised(page.data[max(0, start - 1000) : start], line)
        if about and (who.rank is None or who.guessed):
            who = _with_rank(who, int(about["rank"]))
        self._raise(found, who, when)

    def _raise(self, found: Traceback, who: Who, when: float | None) -> None:
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
                self._keep(Sighting(rule, who, when, self.reading.name, self.reading.source, found.number,
                                    found.text, fields, found))  # fmt: skip

    def _speech(self, page: Page, number: int, start: int, most: int) -> list[tuple[int, str]]:
        """The line at `start` and what the same speaker says next, prefixes taken off."""
        said: list[tuple[int, str]] = []
        own = None
        misses = 0
        data, at = page.onwards(start), 0
        while at < len(data) and len(said) < most and misses < 400:
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            seen = parts(data[at:end])
            line = text(seen[0] if own is None else seen[-1])
            part = _speaker(line, Clock()) if own is None else prefixes.read(line, Clock())
            if own is None:
                own = part.who
            if part.who == own or (not misses and _names_nobody(part.who, own)):
                said.append((number, line[part.at :] if part.who or not own else line))
            else:
                misses += 1
            at, number = end + 1, number + 1
        return said

    def _before(self, page: Page, start: int) -> float | None:
        """The time of the nearest line before that has one."""
        end = start - 1
        for _ in range(_BACK):
            if end <= 0:
                return None
            floor = max(0, end - LONGEST)
            begin = page.data.rfind(b"\n", floor, end) + 1 or floor
            when = self._clock.read(text(page.data[begin : min(end, begin + 400)]))
            if when is not None:
                return when
            end = begin - 1
        return None


def _speaker(line: str, clock: Clock) -> prefixes.Said:
    """Who says the end of a line, where that follows on a progress bar or on what another thread had not ended."""
    glued = _GLUED.search(line)
    cut = glued.start() if glued else max((each.end() for each in _BAR.finditer(line)), default=0)
    if not cut:
        return prefixes.read(line, clock)
    last, whole = prefixes.read(line[cut:], clock), prefixes.read(line, clock)
    if whole.at >= cut + last.at:
        return whole
    who = last.who or whole.who
    return prefixes.Said(who, max(cut + last.at, whole.at), whole.when if last.when is None else last.when)


def _names_nobody(who: Who, own: Who) -> bool:
    """Whether a line may go on what another one said: it has no name, or its launcher's label only."""
    return not who or (who.guessed and who.label == own.label and who.host == own.host)


def _summarised(before: bytes, line: str) -> re.Match[str] | None:
    """The rank whose traceback a line of torchrun's summary begins."""
    if not _OF_SUMMARY.search(line):
        return None
    return next(iter([*_SUMMARY.finditer(before.decode("utf-8", "replace"))][-1:]), None)


def _with_rank(who: Who, rank: int | None) -> Who:
    return who if rank is None else replace(who, rank=rank, guessed=False)
