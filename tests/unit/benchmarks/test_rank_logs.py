"""A folder with a log per rank is read within bounded time and memory."""

import pytest

from benchmarks.rank_logs import measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_ranks_take_less_than_a_minute_of_cpu_and_half_a_gibibyte() -> None:
    cost = measure(1000)
    assert "Rank 500 raised KeyError" in cost.printed
    assert cost.cpu_s < 60 and cost.peak_mib < 512 and cost.page_bytes < 4e6
