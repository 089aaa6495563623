"""The table of notices and verdicts of watched jobs."""

from benchmarks.faults.attach import Measured, table


def test_times_are_medians_and_missing_ones_are_counted() -> None:
    cases = [
        Measured("ddp", "sleep", 0, 3.0, 12.0, (1,), 10.0),
        Measured("ddp", "sleep", 0, 4.0, 14.0, (0, 1), 10.0),
        Measured("ddp", "sleep", 0, 3.5, None, (), 10.0),
        Measured("plain", "spin", 2, None, None, (), 10.0),
    ]
    *_, sleeps, spins = table(cases).splitlines()
    assert sleeps == "| sleep | ddp | 0 | 3.5 s | 13.0 s (1 never) | 1 | 3 |"
    assert spins == "| spin | plain | 2 | never | never | 0 | 1 |"
