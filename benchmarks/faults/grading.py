"""Compares the verdicts of a case with the expected one, and computes the statistics of many cases."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.cases import FAULTS, Case, Expected, expected

SURE = 0.8
GOAL = 0.97


@dataclass(frozen=True)
class Judged:
    case: Case
    kind: str
    """The kind of the first verdict at the expected level; `nothing` if there was none."""
    who: frozenset[int]
    """All ranks that were ever named at that level."""
    right: bool
    """Whether exactly the culprits were named; without a majority, both members with low confidence."""
    kind_right: bool
    collective_right: bool
    where_right: bool
    innocents: tuple[int, ...]
    """Innocent ranks that were named with a confidence of `SURE` or more."""
    notice_s: float | None
    confirmed_s: float | None
    freed_s: tuple[float, ...]
    load: float

    @property
    def good(self) -> bool:
        return self.right and self.kind_right and self.collective_right and self.where_right and not self.innocents


def judge(outcome: dict[str, Any]) -> Judged:
    """Compares an outcome with the expected verdict of its case."""
    case = Case.of(outcome["case"])
    want, told = expected(case), [each for each in outcome["told"] if each["change"] != "withdrawn"]
    due = [each for each in told if each["level"] != "notice" or (want.kinds and want.level == "notice")]
    first = next((each for each in due if each["ranks"]), due[0] if due else None)
    who = frozenset(rank for each in due for rank in each["ranks"])
    guilty = want.culprits
    innocents = sorted({r for each in told if each["confidence"] >= SURE for r in each["ranks"] if r not in guilty})
    to_culprit = [each for each in told if guilty & {*each["ranks"]}]
    confirmed = [each["at"] for each in to_culprit if each["level"] != "notice"]
    return Judged(
        case,
        first["kind"] if first else "nothing",
        who,
        who == guilty or (bool(who) and who == want.open_to and all(each["confidence"] < SURE for each in due)),
        first is not None and first["kind"] in want.kinds if want.kinds else first is None,
        first is None or _collective_right(want, first, case),
        not case.about.where or any(f".{case.about.where}()" in place for each in due for place in each["where"]),
        tuple(innocents),
        to_culprit[0]["at"] if to_culprit else None,
        confirmed[0] if confirmed else None,
        tuple(each["freed"] for each in outcome["ends"].values() if each["error"] == "CollectiveStalled"),
        outcome["load"],
    )


def _collective_right(want: Expected, first: dict[str, Any], case: Case) -> bool:
    """Whether the verdict names an expected collective. A verdict `dead` need not name one: the other ranks may have
    left the collective already."""
    said = first["collective"]
    if said is None:
        return not want.collectives or first["kind"] == "dead"
    return not want.collectives or (said["communicator"], said["seq"]) in want.collectives


def matrix(judged: Sequence[Judged]) -> str:
    """A table of faults by the kind of the first verdict, in Markdown."""
    kinds = sorted({each.kind for each in judged})
    counts = Counter((each.case.fault, each.kind) for each in judged)
    lines = [f"| fault | cases | culprits exactly right | {' | '.join(kinds)} |", "|---" * (3 + len(kinds)) + "|"]
    for fault in FAULTS:
        mine = [each for each in judged if each.case.fault == fault]
        if mine:
            cells = " | ".join(str(counts[fault, kind] or "") for kind in kinds)
            lines.append(f"| {fault} | {len(mine)} | {sum(each.right for each in mine)} | {cells} |")
    return "\n".join(lines)


def numbers(judged: Sequence[Judged]) -> str:
    """A table of shares and times, in Markdown."""
    faulty = [each for each in judged if each.case.about.kinds]
    healthy = [each for each in judged if not each.case.about.kinds]
    lines = [
        "| measure | value |",
        "|---|---|",
        f"| cases; healthy ones among them | {len(judged)}, {len(healthy)} |",
        f"| culprit set exactly right | {_share(each.right for each in faulty)} |",
        f"| kind right | {_share(each.kind_right for each in faulty)} |",
        f"| collective right | {_share(each.collective_right for each in faulty)} |",
        f"| cases in which an innocent rank was named with {SURE} or more | "
        f"{sum(bool(each.innocents) for each in judged)} |",
        f"| healthy cases in which a rank was accused | {sum(not each.right for each in healthy)} |",
    ]
    structural = [each for each in faulty if each.case.about.structural]
    still = [each for each in faulty if not each.case.about.structural]
    dead = [each for each in faulty if each.kind == "dead"]
    rows: tuple[tuple[str, Iterable[float | None]], ...] = (
        ("fault to the first message that names the culprit", (each.notice_s for each in faulty)),
        ("the same for dead ranks", (each.notice_s for each in dead)),
        ("fault to confirmed, by structure", (each.confirmed_s for each in structural)),
        ("fault to confirmed, by inactivity", (each.confirmed_s for each in still)),
        ("confirmed to the release of an innocent rank", (seconds for each in faulty for seconds in each.freed_s)),
    )
    return "\n".join([*lines, *(f"| {name}, median / 95th percentile | {_times(values)} |" for name, values in rows)])


def _share(values: Iterable[bool]) -> str:
    found = list(values)
    return f"{sum(found)} of {len(found)} ({100 * sum(found) / max(1, len(found)):.1f}%)"


def _times(values: Iterable[float | None]) -> str:
    found = sorted(each for each in values if each is not None)
    if not found:
        return "-"
    return (
        f"{statistics.median(found):.2f} s / {found[min(len(found) - 1, int(0.95 * len(found)))]:.2f} s ({len(found)})"
    )


def wrong(judged: Sequence[Judged]) -> list[str]:
    """Describes each wrong outcome in a line."""
    said = []
    for each in judged:
        if each.good:
            continue
        want = expected(each.case)
        what = [name for name in ("right", "kind_right", "collective_right", "where_right") if not getattr(each, name)]
        said.append(
            f"{each.case.name} {each.case.fault} {each.case.faults}: reported {each.kind} of {sorted(each.who)}, "
            f"expected {'/'.join(want.kinds) or 'nothing'} of {sorted(want.culprits)} ({', '.join(what)}"
            f"{f'; innocents {list(each.innocents)}' if each.innocents else ''})"
        )
    return said
