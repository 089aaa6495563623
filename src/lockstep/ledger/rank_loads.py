"""How evenly the ranks of a trained role were loaded: what each had to do in each step, and the speeds that this shows.

A rank's pace in a step is its seconds of work per unit of planned cost. Paces are compared with the median of the
ranks of the same step, because steps differ from each other much more than ranks do.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lockstep.base.text import count_noun
from lockstep.ledger import json_values, load_blocks
from lockstep.ledger.errors import IndexDamaged
from lockstep.ledger.load_blocks import LoadSums
from lockstep.ledger.sqlite_index import LedgerIndex

SPEED_STEPS = 8
"""Speeds are measured from so many last steps."""
FEWEST_STEPS = 3
LEAST_SPEED = 0.001
"""Speeds are stored with three decimals. A speed of 0 would be refused when the rows are divided."""
EVEN = 1.05
"""Ranks whose speeds differ less than by this factor count as equally fast."""
SLOW = 1.1
"""A rank is remarked upon only if it takes so many times as long as the median of the others."""
REMARK_STEPS = 64
FALSE_REMARKS = 1e-6
"""The probability that balanced ranks, whatever their noise is, cause a remark about any of them."""


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What each rank of a role had to do in a step. All lists have one value per rank; -1 is unknown."""

    work_s: list[float]
    """Seconds outside of blocking collectives."""
    blocked_s: list[float]
    """Seconds in blocking collectives: waiting for other ranks, or moving data."""
    memory: list[float]
    """Bytes."""
    tokens: list[int]
    cost: list[float]
    """Planned cost of its rows, in units of one token."""


@dataclass(frozen=True, slots=True)
class RankLoadRow:
    """The loads of a role in a step, and the speeds by which its rows had been divided; None if evenly."""

    step: int
    role: str
    speeds: list[float] | None
    loads: RankLoads


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that was slower than the others in nearly every step."""

    role: str
    rank: int
    times: float
    """How many times as long as the median of the other ranks it takes for the same work."""
    steps: int
    slower: int
    """In so many of these steps it was slower than the median."""

    def __str__(self) -> str:
        return (
            f"{self.role} rank {self.rank} takes {self.times:.2f} times as long as the other ranks for the same work "
            f"(slower in {self.slower} of the last {count_noun(self.steps, 'step')})"
        )


class RankLoadRecords:
    """The part of the ledger with the loads of ranks. Steps are indices, as in `Ledger`."""

    _index: LedgerIndex

    def record_rank_speeds(self, step: int, role: str, speeds: Sequence[float]) -> None:
        """Stores the speeds by which the rows of a step are divided, before they are: training the step again divides
        them in the same way."""
        with self._index.transaction() as transaction:
            stored = json_values.dumps(list(speeds), "speeds")
            transaction.put("loads", step=step, role=role, speeds=stored, load="null")

    def record_rank_loads(self, step: int, loads: Mapping[str, RankLoads]) -> None:
        """Stores the loads of a step, by role, and keeps its speeds. A run that trains a thinned step again repeats the
        steps after it too."""
        with self._index.transaction() as transaction:
            if transaction.execute("SELECT 1 FROM load_blocks WHERE last >= ?", step):
                load_blocks.cut_after(transaction, step - 1)
            for role, each in loads.items():
                found = transaction.execute("SELECT speeds FROM loads WHERE step = ? AND role = ?", step, role)
                values = json_values.dumps(_rounded(each), "loads")
                transaction.put("loads", step=step, role=role, speeds=found[0][0] if found else "null", load=values)

    def rank_speeds(self, step: int, role: str) -> list[float] | None:
        """Returns the speeds that were stored for a step; None if there are none."""
        if not self._index.has_table("loads"):
            return None
        found = self._index.rows("SELECT speeds FROM loads WHERE step = ? AND role = ?", step, role)
        return None if not found or found[0][0] == "null" else self._index.parse(found[0][0], list)

    def rank_loads(
        self, role: str | None = None, last: int | None = None, before: int | None = None, most: int | None = None
    ) -> list[RankLoadRow]:
        """Returns the rows by step. Of the first `thinned_load_steps()` steps, only every tenth one has rows.

        Args:
            role: of this role; of all if None.
            last: so many last rows.
            before: of steps before this one.
            most: of so many steps at most: the last one, and others at even distances.
        """
        if not self._index.has_table("loads"):
            return []  # a run of a version that measured none
        bound = 2**62 if before is None else before
        with self._index.snapshot():
            stride = 1 if most is None else self._stride(most)
            where = "WHERE load != 'null' AND step < ? AND role = ifnull(?, role)"
            newest = "(SELECT max(step) FROM loads WHERE load != 'null')"
            order = f"ORDER BY step DESC, role DESC {'' if last is None else f'LIMIT {int(last)}'}"
            sql = f"SELECT step, role, speeds, load FROM loads {where}"
            rows = self._index.rows(f"{sql} AND (step % ? = 0 OR step = {newest}) {order}", bound, role, stride)
            if last is None or len(rows) < last:
                kept = load_blocks.kept_rows(self._index, bound)
                rows += [row for row in kept if row[1] == (role or row[1]) and row[0] % stride == 0]
        return [self._load_row(*row) for row in rows[:last][::-1]]

    def thinned_load_steps(self) -> int:
        """The number of steps from the first on of which only every tenth one has loads; 0 in a short run."""
        return load_blocks.last_thinned(self._index) + 1

    def rank_load_sums(self) -> dict[str, LoadSums]:
        """Returns the sums by role over all steps in which it had as many ranks as in its last one."""
        if not self._index.has_table("loads"):
            return {}
        sql = "SELECT role, load FROM loads WHERE load != 'null' ORDER BY step"
        with self._index.snapshot():
            sums = load_blocks.block_sums(self._index)
            for role, load in self._index.rows(sql):
                sums[role] = load_blocks.added(sums.get(role, []), load_blocks.sums_of_step(load))
        return {role: found[-1] for role, found in sums.items()}

    def _stride(self, most: int) -> int:
        """Steps between those of which rows are returned, so that there are at most so many, the last one included."""
        thinned = self.thinned_load_steps()
        steps = thinned + self._index.rows("SELECT count(DISTINCT step) FROM loads WHERE load != 'null'")[0][0]
        unit = load_blocks.THIN if thinned else 1
        return 1 if steps <= most and not thinned else unit * -(-steps // (unit * max(most - 1, 1)))

    def _load_row(self, step: int, role: str, speeds: str, load: str) -> RankLoadRow:
        return RankLoadRow(
            step, role, None if speeds == "null" else self._index.parse(speeds, list), self._parse_loads(load)
        )

    def _parse_loads(self, text: str) -> RankLoads:
        try:
            return RankLoads(**self._index.parse(text, dict))
        except TypeError as error:
            raise IndexDamaged(self._index.path, f"the loads of a step have other fields: {error}") from error


def _rounded(loads: RankLoads) -> dict[str, list[float]]:
    return {name: [float(f"{value:.4g}") for value in values] for name, values in asdict(loads).items()}


def relative_paces(loads: RankLoads) -> list[float] | None:
    """Returns the natural logarithm of each rank's pace divided by the median pace of the step; None if one is
    unknown."""
    if len(loads.work_s) < 2 or min(loads.work_s) <= 0 or min(loads.cost, default=0) <= 0:
        return None
    paces = [math.log(work / cost) for work, cost in zip(loads.work_s, loads.cost, strict=True)]
    middle = statistics.median(paces)
    return [pace - middle for pace in paces]


def measured_speeds(rows: Sequence[RankLoadRow], ranks: int) -> list[float]:
    """Returns the speeds of ranks relative to the fastest, from the medians of their last steps; all 1 if they are
    equally fast, or unknown. It is a pure function of the rows."""
    known = [each.loads for each in rows if len(each.loads.work_s) == ranks]
    paces = [found for each in known if (found := relative_paces(each)) is not None][-SPEED_STEPS:]
    if len(paces) < FEWEST_STEPS:
        return [1.0] * ranks
    of_ranks = [statistics.median(step[rank] for step in paces) for rank in range(ranks)]
    fastest = min(of_ranks)
    if max(of_ranks) - fastest < math.log(EVEN):
        return [1.0] * ranks
    return [max(round(math.exp(fastest - pace), 3), LEAST_SPEED) for pace in of_ranks]


def slow_ranks(rows: Sequence[RankLoadRow]) -> list[SlowRank]:
    """Returns the ranks that were slower than the median of their role in so many of the last steps that equally fast
    ranks are so with probability `FALSE_REMARKS` at most, and that take `SLOW` times as long.

    The test (the sign test, with Bonferroni's correction for the number of ranks) holds for any distribution of the
    noise: of ranks that are equally fast, each is slower than the median in a step with probability one half at most.
    """
    found = []
    for role in dict.fromkeys(each.role for each in rows):
        of_role = [each.loads for each in rows if each.role == role]
        ranks = len(of_role[-1].work_s) if of_role else 0
        paces = [each for loads in of_role if (each := relative_paces(loads)) is not None and len(each) == ranks]
        paces = paces[-REMARK_STEPS:]
        for rank in range(ranks):
            own = [step[rank] for step in paces]
            slower = sum(pace > 0 for pace in own)
            if not own or _probability_of(slower, len(own)) * ranks > FALSE_REMARKS:
                continue
            others = [statistics.median(step[:rank] + step[rank + 1 :]) for step in paces]
            times = math.exp(statistics.median(mine - other for mine, other in zip(own, others, strict=True)))
            if times >= SLOW:
                found.append(SlowRank(role, rank, times, len(own), slower))
    return found


def _probability_of(successes: int, tries: int) -> float:
    """The probability of at least so many heads in fair tosses of a coin."""
    return float(sum(math.comb(tries, number) for number in range(successes, tries + 1)) / 2**tries)
