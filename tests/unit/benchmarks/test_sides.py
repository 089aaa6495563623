"""Both sides do the same work: lengths, settings, taking turns, going on."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import runner
from benchmarks.length_table import ForcedLengths, force_requests
from benchmarks.resource_usage import Usage
from benchmarks.runner import by_name
from benchmarks.side_process import SideFailed, SideProcess
from benchmarks.workloads import WORKS, Side, document_lengths, lengths, lockstep_config, prepare, quick, trl_arguments
from lockstep.config.loader import check_config
from lockstep.data.sample_order import make_uid
from lockstep.rollout.engine_protocol import RequestGroup


def test_the_tail_is_long_and_the_same_in_every_step():
    work = WORKS["tail"]
    table = lengths(work, 3)
    assert table.shape == (48, 8)
    assert (table[:16] == table[16:32]).all()
    assert table.min() >= 1 and table.max() == 64
    assert 18 <= table.mean() <= 25
    assert (lengths(WORKS["fixed"]) == 64).all()
    assert document_lengths(WORKS["sft"], 2).size == 64


def test_a_request_gets_the_length_of_its_row():
    seen = []
    engines = SimpleNamespace(submit=lambda groups, queue="": seen.extend(groups))
    table = np.array([[1, 2], [3, 4], [5, 6]])
    force_requests(engines, table)
    rows = {row: f"9/{make_uid(0, row)}" for row in (2, 1)}
    groups = [RequestGroup(name, bytes(4), [f"{name}/0", f"{name}/1"], [0, 0]) for name in rows.values()]
    engines.submit(groups, queue="q")
    found = [(request.id, request.max_tokens) for group in seen for request in group.requests]
    assert found == [(f"{rows[2]}/0", 5), (f"{rows[2]}/1", 6), (f"{rows[1]}/0", 3), (f"{rows[1]}/1", 4)]


def test_the_processor_ends_rows_where_the_table_says():
    wanted = np.array([1, 3, 2])
    forced, eos, prompt = ForcedLengths(wanted, 7, 5), 7, 5
    drawn = []
    for done in range(3):
        scores = torch.randn(3, 9)
        scores[:, eos] = 10.0
        drawn.append(forced(torch.zeros(3, prompt + done, dtype=torch.long), scores).argmax(-1))
    ends = torch.stack(drawn, 1) == eos
    assert (ends.int().argmax(1) + 1).tolist() == wanted.tolist()
    assert ends.sum() == 3


@pytest.mark.parametrize("name", WORKS)
def test_the_settings_of_both_sides_make_steps_of_the_same_size(name, tmp_path):
    work = WORKS[name]
    assert work.sides[0].program == "lockstep"
    assert {goal.rpartition(" / ")[2] for goal in work.goals} <= {side.name for side in work.sides}
    for side in (side for side in work.sides if side.program == "lockstep"):
        config = check_config(lockstep_config(work, side, tmp_path, 3), "test")
        assert config.trainer.threads == 1
    for side in (side for side in work.sides if side.program == "trl"):
        arguments = trl_arguments(work, side, tmp_path, 3)
        rows = arguments["per_device_train_batch_size"] * arguments.get("gradient_accumulation_steps", 1)
        if work.kind == "grpo":
            assert rows == config.sequences_per_step == work.completions
        elif not arguments.get("packing"):
            assert rows == config.batch_size


def test_prompts_have_the_tokens_they_should(tmp_path):
    from transformers import AutoTokenizer

    work = quick(WORKS["fixed"])
    prepare(work, tmp_path, 2)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert [len(tokenizer(row["prompt"]).input_ids) for row in rows] == [work.prompt_tokens] * 2 * work.prompts


TURNS = """
from benchmarks.side_process import Pacer, Stopped
pacer = Pacer()
print("to the log")
pacer.facts["tokens"] = 0
try:
    while True:
        pacer.begin()
        pacer.facts["tokens"] += 10
except Stopped:
    print("in order")
"""


def test_a_side_works_in_its_turn_only(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(runner.ROOT)}
    with SideProcess([sys.executable, "-c", TURNS], environment, tmp_path / "log") as side:
        assert side.ready() == {"tokens": 0}
        assert side.go(2) == {"tokens": 20}
        assert side.go(1) == {"tokens": 30}
    assert (tmp_path / "log").read_text() == "to the log\nin order\n"


def test_a_side_that_fails_shows_its_log(tmp_path):
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    with (
        SideProcess([sys.executable, "-c", code], dict(os.environ), tmp_path / "log") as side,
        pytest.raises(SideFailed, match=r"ended with 3(.|\n)*no such model"),
    ):
        side.ready()


def test_trl_is_on_the_path_of_its_own_process_only():
    assert str(runner.PEER) in runner.environment(Side("a", "trl"))["PYTHONPATH"].split(os.pathsep)
    assert str(runner.PEER) not in runner.environment(Side("a", "lockstep"))["PYTHONPATH"].split(os.pathsep)


def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    work = WORKS["fixed"]
    record = tmp_path / "raw.jsonl"
    for side in work.sides:
        for repeat in range(2):
            runner.write(record, {"work": work.name, "side": side.name, "repeat": repeat})
    monkeypatch.setattr(runner, "Match", None)
    told = []
    runner.run([work], 2, tmp_path, record, told.append)
    assert told == ["fixed: measured already"]
    with pytest.raises(TypeError):
        runner.run([work], 3, tmp_path, record, told.append)


def test_a_record_goes_on_after_the_last_line_that_a_killed_run_finished(tmp_path):
    record = tmp_path / "raw.jsonl"
    assert runner.read(record) == []
    runner.write(record, {"repeat": 0})
    with record.open("a") as file:
        file.write('{"rep')
    assert runner.read(record) == [{"repeat": 0}]
    runner.write(record, {"repeat": 1})
    assert runner.read(record) == [{"repeat": 0}, {"repeat": 1}]


def test_time_is_told_by_the_names_of_processes():
    before, after = Usage(1.0, {1: 0.5, 2: 0.5}), Usage(4.0, {1: 1.0, 2: 2.5, 3: 0.5})
    assert by_name(before, after, {1: "controller", 2: "engine-0"}) == {
        "controller": 0.5,
        "engine-0": 2.0,
        "other": 0.5,
    }
    assert by_name(before, after, {}) == {"main": 3.0}
