"""The pages say what the results say, and which goals are not met."""

import shutil

import pytest

from benchmarks import docs_tables
from benchmarks.docs_markers import into_page


@pytest.mark.parametrize(
    ("page", "name", "results", "table"), docs_tables.TABLES, ids=[each[1] for each in docs_tables.TABLES]
)
def test_the_pages_have_the_tables_of_the_committed_results(page, name, results, table, tmp_path):
    copy = tmp_path / page
    shutil.copy(docs_tables.ROOT / "docs" / page, copy)
    into_page(copy, "\n".join(table(docs_tables.read(docs_tables.RESULTS / results))) + "\n", name)
    assert copy.read_text() == (docs_tables.ROOT / "docs" / page).read_text(), "run `python -m benchmarks.docs_tables`"


def host(size, memcpy, write, load):
    times = {"write": write, "commit": 0.0, "load": load, "take": load}
    both = {f"{name}_{check}": seconds for name, seconds in times.items() for check in ("sampled", "complete")}
    return {"part": "host", "size": size, "bytes": 8 * 10**6, "repeat": 1, "memcpy": memcpy, "load": 2.0, **both}


def test_ratios_are_medians_of_those_within_a_repeat():
    lines = [host("100M", 1.0, 1.0, 1.0), host("100M", 1.0, 2.0, 2.0), host("100M", 3.0, 3.0, 7.0)]
    text = "\n".join(docs_tables.weights(lines))
    assert "| 100M | both, compared with two memcpys | 4000.0 | 0.00 | 0.60 | 0.6 |" in text  # of 1, 0.5 and 0.6
    assert "All goals are met." in text and "load average 2.0 to 2.0" in text


def test_a_goal_that_is_not_met_is_reported_for_its_size_only():
    text = "\n".join(docs_tables.weights([host("3M", 1.0, 9.0, 9.0), host("100M", 1.0, 2.0, 2.0)]))
    assert "| 0.50 | 0.6 (not met) |" in text
    assert "**Goal not met**: 100M, both, compared with two memcpys 0.50, goal 0.6." in text


def test_an_update_is_compared_with_both_goals():
    row = {f"{name} ms": 10.0 for name in ("copy", "write", "update", "reload", "reload+save")}
    row |= {"model": "3M", "write/copy": 2.5, "reload/update": 1.2, "repeats": 5, "load": 0.5}
    text = "\n".join(docs_tables.update([row]))
    assert "3M, Lockstep's part in memcpys 2.50, goal at most 2" in text and "/ update 1.20, goal 1.3." in text


def test_generation_is_compared_with_both_settings_of_vllm():
    row = {"model": "3M", "work": "tail", "ours median": 1.0, "generate median": 1.0}
    assert "| 1.00 | not measured |  | 0.95 |" in "\n".join(docs_tables.generate([row]))
    text = "\n".join(docs_tables.generate([row | {"generate median": 1.2, "defaults median": 0.9}]))
    assert "| 1.20 | 0.90 | 0.75 | 0.95 (not met) |" in text and "3M tail, its defaults 0.90, goal 0.95" in text
