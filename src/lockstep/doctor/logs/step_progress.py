"""Parses progress counters (steps, epochs, progress bars) and tells how many steps follow a line."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.logs.parsed_log import ParsedLog, ProgressTick

_DIGIT = re.compile(r"\d")
_HEAD_CHARS = 600
"""Characters searched for a counter; a trainer's metric rows have theirs at the end."""
_STEP = re.compile(
    r"(?:\"(?:step|iteration|global_step|it)\": ?|\b(?:global[_ ]?)?(?:step|steps|iteration|iter|Step|Iteration|Iter"
    r"|STEP|update|batch|Batch|it)(?:s)?[ =:#\[(]{1,12})(?P<step>\d{1,9})(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
    r"|\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<"
    r"|Epoch:? ?\[(?P<epoch>\d+)\](?: ?\[ *(?P<in>\d+)/(?P<last>\d+)\])?"
    r"|\b[Ee]poch[ =:]{1,2}(?P<epochs>\d{1,6})(?:/(?P<epochs_of>\d+))?\b"
    r"|\b(?:rows|samples|requests|prompts|episodes|documents|tasks|images|examples|trials|trajectories)(?: \w+)?"
    r"[ =:]{1,2}(?P<count>\d+)\b|\b(?:rollout|episode|game|sample|request|trial|question) #?(?P<number>\d+)\b"
)
_BAR = re.compile(r"\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<")
_WITHIN = re.compile(
    r"(?i)\b(?:step|iteration|iter|batch|it)s?[ =:#\[(]{1,12}(?P<step>\d{1,9})(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
)
"""Follows the number of an epoch: `epoch 3 batch 11`."""
_ROW = re.compile(r"\{.*['\"]epoch['\"]: ?['\"]?(?P<at>\d{1,6}(?:\.\d+)?(?:e-?\d{1,2})?)")
"""Rows of transformers' and TRL's trainers, which count fractions of an epoch: `{'loss': 0.61, ..., 'epoch': 0.12}`,
with quoted numbers from release 5 on."""
_PARTS = 1_000_000


def parse_step(line: str) -> tuple[int, int, int, bool] | None:
    """Epoch, step, total, and whether it is a progress bar; None if the line has no counter."""
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
    step = found["step"] or found["bar"] or found["in"] or found["count"] or found["number"]
    of = found["of"] or found["total"] or found["last"] or found["epochs_of"] or 0
    return epoch, int(step) if step is not None else 0, int(of), found["bar"] is not None


def _step_within_epoch(line: str, epoch: re.Match[str] | None) -> tuple[int, int, int, bool] | None:
    """The counter within an epoch: a bar or step after the epoch, or a row that gives the epoch as a fraction."""
    if epoch is not None:
        bar, within = _BAR.search(line, epoch.end(), _HEAD_CHARS), _WITHIN.search(line, epoch.end(), _HEAD_CHARS)
        if bar is not None:
            return int(epoch["epochs"]), int(bar["bar"]), int(bar["total"]), True
        return None if within is None else (int(epoch["epochs"]), int(within["step"]), int(within["of"] or 0), False)
    row = _ROW.search(line) if "{" in line and "epoch" in line else None
    if row is None:
        return None
    whole, part = divmod(float(row["at"]), 1.0)
    return int(whole), round(part * _PARTS), 0, False


FEW_STEPS = 2
"""This many steps after a failure may have been under way already."""
MANY_STEPS = 10
"""More than ranks that wait for a dead rank can make."""
_ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class _RankSteps:
    """The counters of one rank, in line order.

    Attributes:
        lines: Their line numbers.
        left: Number of different counters on each of these lines and after it.
        most: The highest of these counters.
        reached: The highest of all.
    """

    lines: list[int]
    left: list[int]
    most: list[tuple[int, int]]
    reached: tuple[int, int]


class StepHistory:
    """The steps in all files of an attempt."""

    def __init__(self, logs: Sequence[ParsedLog], old: Collection[int]) -> None:
        self._after = {log.source: _steps_of_ranks(log.ticks) for log in logs if log.source not in old}

    def continued_after(self, source: int, rank: int | None, line: int, *, fatal: bool = False) -> bool:
        """Whether steps follow a line: of the same rank if it is known, else of any rank.

        If that rank counted before and does not any more, the others must get many steps further than it: in a file
        merged from those of several ranks, their lines follow its last ones.

        Args:
            fatal: No process survives what the line reports, so many steps of other ranks are needed.
        """
        counted = self._after.get(source, {})
        own, all_of_them = counted.get(rank), counted.get(_ANY_RANK)
        if own is not None:
            at = bisect_right(own.lines, line)
            if at < len(own.lines):
                return own.left[at] > (MANY_STEPS if fatal and rank is None else FEW_STEPS)
        if all_of_them is None:
            return False
        at = bisect_right(all_of_them.lines, line)
        if at == len(all_of_them.lines):
            return False
        if own is not None and rank is not None:
            epoch, step = own.reached
            return all_of_them.left[at] > MANY_STEPS and all_of_them.most[at] > (epoch, step + 1)
        return all_of_them.left[at] > (MANY_STEPS if fatal else FEW_STEPS)


def _steps_of_ranks(ticks: Sequence[ProgressTick]) -> dict[int | None, _RankSteps]:
    """The steps of each rank."""
    of_rank: dict[int | None, list[ProgressTick]] = defaultdict(list)
    for tick in ticks:
        of_rank[_ANY_RANK].append(tick)
        of_rank[tick.origin.rank].append(tick)
    found = {}
    for rank, own in of_rank.items():
        seen: set[tuple[int, int]] = set()
        left, most = [], []
        highest = (0, 0)
        for tick in reversed(own):
            seen.add((tick.epoch, tick.step))
            highest = max(highest, (tick.epoch, tick.step))
            left.append(len(seen))
            most.append(highest)
        found[rank] = _RankSteps([tick.line for tick in own], left[::-1], most[::-1], highest)
    return found


def last_step_by_rank(ticks: Iterable[ProgressTick]) -> Mapping[int, ProgressTick]:
    """The last counter of each rank."""
    found: dict[int, ProgressTick] = {}
    for tick in ticks:
        if tick.origin.rank is not None:
            found[tick.origin.rank] = tick
    return found
