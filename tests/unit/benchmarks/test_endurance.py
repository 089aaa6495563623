"""The endurance benchmark: its schedule, its file, and what it takes for a false alarm or for growth."""

import json
from collections import Counter

import pytest

from benchmarks.endurance import summary
from benchmarks.endurance.record import Record
from benchmarks.endurance.schedule import EVERY, FAULTS, STEPS, VARIANTS, Variant, episode
from benchmarks.endurance.watching import Accusable, false_alarms, grown, seconds_until_named
from benchmarks.faults.run_faults import HOW


def test_every_combination_is_run_and_every_tenth_step_has_a_fault() -> None:
    assert len({each.name for each in VARIANTS}) == len(VARIANTS) == 4 * 3 * 2
    for number in range(3 * len(VARIANTS)):
        each = episode(72, number)
        assert [step for step, _ in each.faults] == list(range(EVERY, STEPS, EVERY))
        assert {fault.how for _, fault in each.faults} <= HOW.keys()
        names = [fault.name for _, fault in each.faults]
        assert not {"full disk", "slow disk"} <= set(names) and each.small_disk == ("full disk" in names)


def test_seed_and_number_decide_an_episode() -> None:
    assert episode(72, 5) == episode(72, 5)
    assert episode(72, 5).faults != episode(73, 5).faults
    assert [episode(72, turn * len(VARIANTS)).seed for turn in range(3)] == [72] * 3, "one undisturbed run is enough"


def test_a_variant_gets_all_its_faults_equally_often() -> None:
    faults = Variant("ppo", "local", "fsdp2").faults
    place = next(i for i, each in enumerate(VARIANTS) if each.name == "ppo local fsdp2")
    turns = 4 * len(faults)
    counts = Counter(f.name for t in range(turns) for _, f in episode(1, place + t * len(VARIANTS)).faults)
    assert counts.total() == turns * FAULTS and counts.keys() == {each.name for each in faults}
    exchanged = counts.pop("kill policy") + counts.pop("slow disk")
    assert set(counts.values()) == {4 * FAULTS} and exchanged == 8 * FAULTS


@pytest.mark.parametrize(("cluster", "clock"), [("local", True), ("ray", False), ("hosts", False)])
def test_only_local_runs_have_a_clock_that_jumps(cluster: str, clock: bool) -> None:
    names = {each.name for each in Variant("grpo", cluster, "fsdp2").faults}
    assert ("jump of clock" in names) == clock and ("cut host" in names) == (cluster == "hosts")


def test_a_file_says_where_to_continue(tmp_path) -> None:
    path = tmp_path / "endurance.jsonl"
    assert (Record(path).next_episode, Record(path).seed) == (0, None)
    record = Record(path)
    record.append({"seed": 7, "made": {}})
    record.append({"episode": 0, "wall_s": 1800.0})
    record.append({"episode": 1, "skipped": "the package ray is not installed"})
    with path.open("a") as file:
        file.write('{"episode": 2, "wall_s": 18')  # the machine was lost
    again = Record(path)
    assert (again.next_episode, again.seed, again.hours) == (2, 7, 0.5)
    again.append({"episode": 2, "wall_s": 1800.0})
    assert [json.loads(line).get("episode") for line in path.read_text().splitlines()] == [None, 0, 1, 2]


def said(at: float, *who: str) -> dict:
    return {"said_at": at, "who": list(who), "text": "has died", "change": "told", "verdict": "dead"}


def test_a_verdict_is_wrong_if_nothing_was_done_to_the_process_it_names() -> None:
    faults = [Accusable(100.0, 110.0, ("policy-1",)), Accusable(200.0, 210.0, ("engine-0",))]
    assert false_alarms([said(103.0, "policy-1"), said(205.0, "engine-0")], faults) == []
    assert false_alarms([said(103.0, "policy-1", "policy-0")], faults) == ["policy-0: has died"]
    assert false_alarms([said(103.0, "policy-1"), said(108.0, "policy-1")], faults) == ["once more policy-1: has died"]
    assert len(false_alarms([said(203.0, "policy-1"), said(99.0 - 1, "policy-1")], faults)) == 2
    back = Accusable(40.0, 50.0, ("policy-1",))  # the clock was set back
    assert false_alarms([said(103.0, "policy-1"), said(43.0, "policy-1")], [*faults, back]) == []
    assert seconds_until_named([said(205.5, "engine-0")], faults[1]) == 5.5
    assert seconds_until_named([said(205.5, "engine-0")], faults[0]) is None


def usage(memory: int, files: int, before: int = 40) -> dict:
    return {"process": "agent", "memory": 400 << 20, "more_memory": memory, "files": before, "more_files": files}


def test_growth_is_more_files_or_much_more_memory() -> None:
    rows = [usage(18 << 20, 2), usage(21 << 20, 0), usage(0, 3)]
    assert grown(rows, []) == grown([], rows) == rows[1:]


def test_files_that_the_undisturbed_run_has_too_are_no_growth() -> None:
    back, more = usage(0, 10, before=31), usage(0, 13, before=31)
    assert grown([back, more], [usage(0, 0, before=40)]) == [more]


def fault(name: str, **facts) -> dict:
    return {"fault": name, "step": 10, "skipped": "", "named_s": None, "back_s": 4.0, "resumed": False} | facts


def test_the_summary_counts_what_was_skipped_and_what_failed() -> None:
    done = {
        "episode": 0, "variant": "grpo local fsdp2", "wall_s": 360.0, "span_s": 100.0, "steps": 100, "load": 2.0,
        "step_s": 0.5, "lost_steps": 0, "difference": 0, "exact": True, "false_alarms": [], "orphans": 1,
        "calm": {"growth": [usage(0, 0)]}, "growth": [usage(0, 3)],
        "failures": [{"expectation": "nothing is left of the run", "found": "process 7"}],
        "faults": [fault("stop policy", named_s=1.5), fault("slow disk", skipped="no cgroups")],
    }  # fmt: skip
    lines = [{"seed": 1, "made": {"cpu": "a cpu", "cores": 2}}, done, {"episode": 1, "skipped": "no ray"}]
    text = "\n".join(summary.summary(lines))
    assert "| wall time, with the undisturbed runs | 0.10 h |" in text
    assert "| faults | 1, and 1 skipped |" in text and "Skipped: slow disk: no cgroups." in text
    assert "| runs that cannot be made on the machine | 1 |" in text
    assert "| stop policy | 1 | 0 | 1.5 s | 1.5 s | 4.0 s | 4.0 s |" in text
    assert "1 of 2 |" in text and "50% to 50%" in text
    assert "- episode 0 (grpo local fsdp2): nothing is left of the run; found: process 7" in text
    assert summary.summary(lines[:1]) == ["Nothing has been measured yet."]
