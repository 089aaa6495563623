"""Parses progress counters (steps, epochs, progress bars) and finds out whether training continued after a line."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.logs.parsed_log import ParsedLog, StepCounter

_DIGIT = re.compile(r"\d")
_HEAD_CHARS = 600
"""Characters of a line that are searched for a counter. Rows of metrics, which end with it, are searched as a whole."""
_STEP = re.compile(
    r"(?:\"(?:step|iteration|global_step|it|done)\": ?|\b(?<!otal )(?<!ptimization )(?<!ccumulation )(?<!armup )"
    r"(?:global[_ ]?)?(?:step|steps|iteration|iter|Step|Iteration"
    r"|Iter|STEP|update|batch|Batch|it)(?:s)?[ =:#\[(]{1,12})(?P<step>\d{1,9})(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
    r"|\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<"
    r"|Epoch:? ?\[(?P<epoch>\d+)\](?: ?\[ *(?P<in>\d+)/(?P<last>\d+)\])?"
    r"|\b[Ee]poch[ =:]{1,2}(?P<epochs>\d{1,6})(?:/(?P<epochs_of>\d+))?\b"
    r"|(?:^|[\s:\]])\[ ?(?P<square>\d{1,9})\](?= ?[\w/]*(?:loss|acc|reward|return|ppl|grad|score)\w*[=: ]+-?[\d.])"
    r"|\b(?:Train|Test|Val\w{0,8}|Eval\w{0,6}):? ?(?:\[\d+\])?\[ *(?P<within>\d{1,9})/(?P<within_of>\d{1,9})\]"
    r"|\b(?:rows|samples|requests|prompts|episodes|documents|tasks|images|examples|trials|trajectories)(?: \w+)?"
    r"[ =:]{1,2}(?P<count>\d+)\b"
    r"|\b(?:rollout|episode|game|[Rr]ound|sample|request|[Tt]rial|question) #?(?P<number>\d+)\b"
    r"|(?:^|[\s:\]])(?P<bare>\d{1,9})/(?P<bare_of>\d{1,9}) {1,3}(?=[\w/]+=\S)"
)
"""A number of steps that a trainer announces (`Total optimization steps = 870`) counts nothing."""
_BAR = re.compile(r"\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<")
_WITHIN = re.compile(
    r"(?i)(?:\b(?:step|iteration|iter|batch|it)s?[ =:#\[(]{1,12}|\[ *)(?P<step>\d{1,9})"
    r"(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
)
"""A counter after the number of an epoch: `epoch 3 batch 11`, `Epoch 3 [ 10/400]`."""
_ROW = re.compile(r"\{.*['\"]epoch['\"]: ?['\"]?(?P<at>\d{1,6}(?:\.\d+)?(?:e-?\d{1,2})?)")
"""Rows of transformers' and TRL's trainers, which count fractions of an epoch: `{'loss': 0.61, ..., 'epoch': 0.12}`,
with quoted numbers from release 5 on."""
_UNITS_PER_EPOCH = 1_000_000
"""A fraction of an epoch is converted to this many steps."""


def parse_step(line: str) -> tuple[int, int, int, bool] | None:
    """Returns epoch, step, total, and whether the counter is a progress bar; None if the line has no counter."""
    if _DIGIT.search(line, 0, 400) is None:
        return None
    found = _STEP.search(line[:_HEAD_CHARS])
    if found is None or (found["epochs"] and not found["epochs_of"]):
        finer = _step_within_epoch(line, found)
        if finer is not None:
            return finer
    if found is None:
        return None
    epoch = int(found["epoch"] or found["epochs"] or 0)
    step = found["step"] or found["bar"] or found["in"] or found["within"]
    step = step or found["square"] or found["count"] or found["number"] or found["bare"]
    of = found["of"] or found["total"] or found["last"] or found["within_of"] or found["epochs_of"] or found["bare_of"]
    return epoch, int(step) if step is not None else 0, int(of or 0), found["bar"] is not None


def _step_within_epoch(line: str, epoch: re.Match[str] | None) -> tuple[int, int, int, bool] | None:
    """Returns the counter within an epoch: a bar or step after the epoch, or the fraction of an epoch in a row."""
    if epoch is not None:
        bar, within = _BAR.search(line, epoch.end(), _HEAD_CHARS), _WITHIN.search(line, epoch.end(), _HEAD_CHARS)
        if bar is not None:
            return int(epoch["epochs"]), int(bar["bar"]), int(bar["total"]), True
        return None if within is None else (int(epoch["epochs"]), int(within["step"]), int(within["of"] or 0), False)
    row = _ROW.search(line) if "{" in line and "epoch" in line else None
    if row is None:
        return None
    epochs, fraction = divmod(float(row["at"]), 1.0)
    return int(epochs), round(fraction * _UNITS_PER_EPOCH), 0, False


_SERVED = re.compile(
    r"\"POST /\S{1,200} HTTP/\d(?:\.\d)?\" 2\d\d\b|\bgen(?:eration)? throughput[^\d]{1,20}(?=[\d.]*[1-9])[\d.]"
)


def serves(line: str) -> bool:
    """Whether a line of a server shows work done: a request that succeeded, or tokens generated in an interval."""
    return ("POST" in line or "throughput" in line) and _SERVED.search(line[:_HEAD_CHARS]) is not None


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SHAPE_CHARS = 48
_MAX_SHAPES = 512
"""Further forms of lines of a file are not followed."""
_MIN_RISES = 8
"""Fewer lines may be a table of the GPUs or the processes of a host."""
_NO_PROGRESS = re.compile(
    r"(?i)\b(?:wait\w*|retry\w*|retries|attempts?|time ?out\w*|timed|elapsed|still|stuck|stall\w*|alive|heartbeat"
    r"|sleep\w*|reconnect\w*|remaining|since|Xid|frame|warn\w*|error|fail\w*|kill\w*|terminat\w*|signal|pid|process\w*)\b"
    r"|NCCL|ProcessGroup|c10d|\.cpp:|\.cc:|^\s*File |^#\d|^\|"
)
"""Lines whose number may grow although nothing is done: waits, retries, reports of trouble, stack frames."""


class RisingNumbers:
    """Finds the counters of a file whose form is unknown: lines of the same form whose first number grows each time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def count(self, text: str) -> tuple[int, int, int, bool] | None:
        """Returns a counter like `parse_step`, once the number of such lines has grown several times; else None.

        Args:
            text: A line without its prefixes.
        """
        found = _NUMBER.search(text, 0, _SHAPE_CHARS)
        if found is None or _NO_PROGRESS.search(text, 0, _HEAD_CHARS):
            return None
        shape = _NUMBER.sub("#", text[:_SHAPE_CHARS])[: found.start() + 12]
        number = float(found[0])
        last, rises = self._last.get(shape, (number, -1))
        if rises >= 0 or len(self._last) < _MAX_SHAPES:
            rises = rises + 1 if number > last or rises < 0 else 0
            self._last[shape] = number, rises
        return (0, int(number), 0, False) if rises >= _MIN_RISES else None


FEW_STEPS = 2
"""This many steps may still end after a failure, because they had already begun."""
MANY_STEPS = 10
"""More steps than ranks can make that wait for a dead rank."""
_ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class _RankSteps:
    """The counters of one rank, in line order.

    Attributes:
        lines: The line numbers of the counters.
        remaining: For each of these lines the number of different counters from there on.
        highest_remaining: For each of these lines the highest counter from there on, as epoch and step.
        highest: The highest counter.
    """

    lines: list[int]
    remaining: list[int]
    highest_remaining: list[tuple[int, int]]
    highest: tuple[int, int]


class StepHistory:
    """The steps in all files of an attempt."""

    def __init__(self, logs: Sequence[ParsedLog], old: Collection[int]) -> None:
        self._by_source = {log.source: _steps_of_ranks(log.counters) for log in logs if log.source not in old}

    def continued_after(self, source: int, rank: int | None, line: int, *, fatal: bool = False) -> bool:
        """Whether steps follow a line: steps of the same rank if the rank is known, otherwise of any rank.

        If the rank printed counters before the line and none after it, the other ranks must get many steps further than
        that rank: in a file merged from the files of several ranks, lines of others can follow the rank's last lines.

        Args:
            fatal: No process survives what the line reports, so many steps of other ranks are needed.
        """
        by_rank = self._by_source.get(source, {})
        of_rank, of_all = by_rank.get(rank), by_rank.get(_ANY_RANK)
        if of_rank is not None:
            at = bisect_right(of_rank.lines, line)
            if at < len(of_rank.lines):
                return of_rank.remaining[at] > (MANY_STEPS if fatal and rank is None else FEW_STEPS)
        if of_all is None:
            return False
        at = bisect_right(of_all.lines, line)
        if at == len(of_all.lines):
            return False
        if of_rank is not None and rank is not None:
            epoch, step = of_rank.highest
            return of_all.remaining[at] > MANY_STEPS and of_all.highest_remaining[at] > (epoch, step + 1)
        fatal = fatal or (rank is not None and None not in by_rank)
        return of_all.remaining[at] > (MANY_STEPS if fatal else FEW_STEPS)


def _steps_of_ranks(counters: Sequence[StepCounter]) -> dict[int | None, _RankSteps]:
    """Returns the steps of each rank, and those of all ranks under `_ANY_RANK`."""
    by_rank: dict[int | None, list[StepCounter]] = defaultdict(list)
    for counter in counters:
        by_rank[_ANY_RANK].append(counter)
        by_rank[counter.origin.rank].append(counter)
    found = {}
    for rank, own in by_rank.items():
        seen: set[tuple[int, int]] = set()
        remaining, highest_remaining = [], []
        highest = (0, 0)
        for counter in reversed(own):
            seen.add((counter.epoch, counter.step))
            highest = max(highest, (counter.epoch, counter.step))
            remaining.append(len(seen))
            highest_remaining.append(highest)
        lines = [counter.line for counter in own]
        found[rank] = _RankSteps(lines, remaining[::-1], highest_remaining[::-1], highest)
    return found


def last_step_by_rank(counters: Iterable[StepCounter]) -> Mapping[int, StepCounter]:
    """Returns the last counter of each rank."""
    found: dict[int, StepCounter] = {}
    for counter in counters:
        if counter.origin.rank is not None:
            found[counter.origin.rank] = counter
    return found
