"""The table, from measurements written by hand."""

from dataclasses import replace

import pytest

from benchmarks import comparison_table, docs_markers, results, staleness
from benchmarks.workloads import Side, Work

WORK = Work(
    "w", "Some work", "grpo", (Side("lockstep", "lockstep"), Side("trl", "trl", title="TRL")), {"trl": 2.5},
    prompts=4, group=2, details=1,
)  # fmt: skip
DOCUMENTS = Work("d", "Documents", "sft", (Side("lockstep", "lockstep"), Side("trl", "trl")), {"trl": 1.5}, group=1)


def line(work, side, cpu_s, wall_s=1.0, tokens=0, steps=1, by_process=None, mib=10):
    return {
        "work": work, "side": side, "repeat": 0, "steps": steps, "cpu_s": cpu_s, "wall_s": wall_s, "tokens": tokens,
        "peak_bytes": mib << 20, "load": 0.5, "by_process": by_process or {},
    }  # fmt: skip


def test_ratios_are_of_medians_per_step():
    lines = [line("w", "lockstep", cpu, steps=2) for cpu in (4.0, 2.0, 99.0)]
    lines += [line("w", "trl", cpu) for cpu in (6.0, 4.0, 5.0)]
    assert comparison_table.row(WORK, WORK.sides[0], lines).cpu_s == 2.0
    assert comparison_table.row(WORK, WORK.sides[1], lines).spread == pytest.approx(2 / 5)
    assert comparison_table.row(WORK, WORK.sides[0], lines).rate == 8 / 2.0
    text = "\n".join(comparison_table.comparison([WORK], lines))
    assert "**2.50x** | 2.5x |" in text
    assert "not met" not in text


def test_a_goal_that_is_not_met_says_so():
    text = "\n".join(comparison_table.comparison([WORK], [line("w", "lockstep", 2.0), line("w", "trl", 4.0)]))
    assert "**2.00x** | 2.5x (not met) |" in text


def test_other_ways_to_run_lockstep_have_goals_of_their_own():
    compiled = Side("compiled", "lockstep", title="compiled layers")
    work = replace(WORK, sides=(*WORK.sides, compiled), goals={"trl": 2.0, "compiled / trl": 9.0})
    text = "\n".join(
        comparison_table.comparison(
            [work], [line("w", *each) for each in (("lockstep", 2.0), ("trl", 4.0), ("compiled", 1.0))]
        )
    )
    assert "**2.00x** | 2x |" in text
    assert "| Some work; compiled layers | TRL |" in text and "**4.00x** | 9x (not met) |" in text


def test_documents_are_compared_by_real_tokens_as_sides_may_batch_others():
    lines = [line("d", "lockstep", 1.0, tokens=3000), line("d", "trl", 2.0, tokens=4000)]
    text = "\n".join(comparison_table.comparison([DOCUMENTS], lines))
    assert "3,000 tokens/CPU s | 2,000 tokens/CPU s | **1.50x** | 1.5x |" in text


def test_sides_that_were_not_measured_are_left_out():
    assert len(comparison_table.comparison([WORK], [line("w", "lockstep", 2.0)])) == 2


def test_overhead_is_what_neither_decodes_nor_trains():
    details = {
        "rollout": {"controller": 4.0, "engine-0": 100.0, "policy-0": 0.5, "agent": 1.0, "scorer-0": 0.0},
        "ledger": {"controller": 2.0, "engine-0": 0.0, "policy-0": 0.0, "agent": 0.0, "scorer-0": 0.0},
        "train": {"controller": 3.0, "engine-0": 0.0, "policy-0": 200.0, "agent": 1.0, "scorer-0": 0.0},
        "publish": {"controller": 1.0, "engine-0": 5.0, "policy-0": 4.0, "agent": 0.0, "scorer-0": 0.0},
    }
    parts = comparison_table.overhead_parts(details)
    assert parts["weight sync: trainer, controller, engine"] == 10.0
    assert parts["node agent"] == 2.0
    assert sum(parts.values()) == 4 + 0.5 + 1 + 2 + 3 + 1 + 10
    text = "\n".join(comparison_table.overhead(WORK, [{"details": "w", "ms": details}]))
    assert "**all** (goal: under 5%, not met)" in text
    assert "**6.69%**" in text


def test_floors_divide_the_time_of_the_process_that_does_the_work():
    lines = [line("w", "lockstep", 3.0, by_process={"engine-0": 2.0, "policy-0": 1.0})]
    lines += [{"floors": {"work": "w", "training": 0.5}}, {"floors": {"work": "w", "generation": 0.25}}]
    text = "\n".join(comparison_table.floors([WORK], lines))
    assert "generation | 2.000 | 0.250 | 8.00" in text
    assert "training | 1.000 | 0.500 | 2.00" in text


def test_the_page_gets_the_tables_between_its_markers(tmp_path):
    page, (begin, end) = tmp_path / "page.md", docs_markers.markers("mine")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    docs_markers.into_page(page, r"new \1", "mine")
    assert page.read_text() == f"before\n{begin}\n\nnew \\1\n{end}\nafter\n"
    with pytest.raises(ValueError, match=r"page\.md"):
        docs_markers.into_page(page, "new")


def test_a_record_that_was_cut_short_is_read_to_its_last_whole_line(tmp_path):
    (tmp_path / results.RAW).write_text('{"a": 1}\n{"b": ')
    assert results.read(tmp_path) == [{"a": 1}]


def test_runs_ahead_are_held_against_the_run_in_turn():
    def run(staleness, wall_s, cpu_s):
        return {
            "ahead": "tail", "max_staleness": staleness, "repeat": 0, "steps": 2, "wall_s": wall_s, "cpu_s": cpu_s,
            "load": 0.5, "staleness": staleness / 2, "ready": 0.25 * staleness,
        }  # fmt: skip

    lines = [run(0, wall, 8.0) for wall in (9.0, 6.0, 5.0)] + [run(1, wall, 9.0) for wall in (4.0, 3.0, 1.0)]
    found = staleness.ahead_table(lines)
    assert found[2].endswith("| 0 | 3.00 | 1.00x | 4.00 | 0% | 0.00 | 3 |")
    assert found[3].endswith("| 1 | 1.50 | 2.00x | 4.50 | 25% | 0.50 | 3 |")
    assert len(found) == 4
    assert staleness.ahead_table([]) == []
