"""The cases, batches and table of notices and verdicts of watched jobs."""

from benchmarks.faults.attach import Measured, table
from benchmarks.faults.attach_faults import FAULTS, LOOPS, attach_cases, batches


def measured(
    fault: str, load: int, noticed: float | None, confirmed: float | None, accused: tuple[int, ...], average: float
) -> Measured:
    return Measured(fault, "ddp", load, 0, noticed, confirmed, accused, 20.0, 10.0, average)


def test_times_have_median_and_worst_and_missing_ones_are_counted() -> None:
    cases = [
        measured("sleep", 0, 3.0, 12.0, (1,), 0.5),
        measured("sleep", 0, 4.0, 14.0, (0, 1), 0.7),
        measured("sleep", 0, 3.5, None, (), 0.6),
        measured("two", 0, 3.0, 11.0, (1, 2), 0.6),
        measured("spin", 2, None, None, (), 4.0),
        measured("builds", 2, None, None, (1,), 5.0),
    ]
    _, _, sleeps, both, builds, spins, _, quiet, loaded = table(cases).splitlines()
    assert sleeps == "| sleep | 0 | 3 | 3.5 s / 4.0 s | 13.0 s / 14.0 s (1 never) | 1 | 1 |"
    assert both == "| two | 0 | 1 | 3.0 s / 3.0 s | 11.0 s / 11.0 s | 1 | 0 |"
    assert builds == "| builds (healthy) | 2 | 1 | never | never | 0 | 1 |"
    assert spins == "| spin | 2 | 1 | never | never | 0 | 0 |"
    assert "With 0 busy processes per core, the load average was 0.5 to 0.7, median 0.6" in quiet
    assert "With 2 busy processes per core, the load average was 4.0 to 5.0, median 4.5" in loaded


def test_every_kind_is_measured_in_its_loops_and_batches_are_of_one_group_and_load() -> None:
    cases = list(attach_cases(tuple(FAULTS), LOOPS, (0, 2), 2))
    assert {(each.fault, each.loop) for each in cases} == {
        (name, at) for name, is_ in FAULTS.items() for at in is_.loops
    }
    assert len({each.name for each in cases}) == len(cases)
    found = list(batches(cases, 4))
    assert [case for batch in found for case in batch] == cases
    assert all(len({(each.load, each.about.group) for each in batch}) == 1 and len(batch) <= 4 for batch in found)
    assert all(each.limit_s(10.0) > 100.0 for each in cases if each.about.group == "busy")
