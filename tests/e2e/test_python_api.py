"""Runs that are started from Python."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from forked_controller import ENVIRONMENT
from harness import config, task
from python_rewards import first_digit
from safetensors.numpy import load_file

import lockstep
from lockstep.config.loader import check_config
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("python api"), pytest.mark.timeout(300)]

ROWS = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}"[0]} for n in range(0, 80, 7)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("python"))


def values(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A run of two steps on one rank, whose data and rewards the test gives."""
    found = config(home, "grpo", name=name, steps=2, checkpoint={"every": 1}, **changes)
    found |= {"trainer": {**found["trainer"], "ranks": 1}}
    return {key: value for key, value in found.items() if key not in ("data", "reward", "evaluation")}


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "export" / "model.safetensors")


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def finished(home: Path) -> lockstep.Result:
    """A run with a function of this folder and a list of rows."""
    return lockstep.train(
        values(home, "finished"), data=ROWS, evaluation_data=ROWS[:4], rewards=[first_digit, {"kind": "exact_match"}]
    )


def test_a_run_returns_its_result(finished: lockstep.Result, home: Path) -> None:
    assert finished.folder == home / "runs" / "finished" and finished.steps == 2 and finished.stopped_early is None
    metrics = finished.metrics
    assert metrics["step"] == [0, 1, 2]
    assert {len(column) for column in metrics.values()} == {3}
    assert np.isnan(metrics["reward/mean"][0]) and 0 <= metrics["reward/mean"][2] <= 2
    assert np.isfinite(metrics["eval/reward_mean"][0]) and any("first_digit" in name for name in metrics)
    assert finished.report is None, "the config turns it off"
    model, tokenizer = finished.model(), finished.tokenizer()
    exported = weights(finished.folder)
    assert all(
        np.array_equal(exported[name], value.numpy()) for name, value in model.state_dict().items() if name in exported
    )
    assert tokenizer.decode(tokenizer.encode("12=")).startswith("12=")
    assert not np.array_equal(finished.model(1).lm_head.weight.detach(), model.lm_head.weight.detach())


@pytest.mark.slow
def test_a_dataset_and_a_yaml_file_give_the_same_run_as_a_list(finished: lockstep.Result, home: Path) -> None:
    import yaml

    file = home / "run.yaml"
    file.write_text(yaml.safe_dump(values(home, "other")))
    result = lockstep.train(
        file,
        data=datasets.Dataset.from_list(ROWS),
        evaluation_data=datasets.Dataset.from_list(ROWS[:4]),
        rewards=[first_digit, {"kind": "exact_match"}],
        overrides={"name": "dataset"},
    )
    assert sorted(path.suffix for path in (result.folder / "inputs").iterdir()) == [".parquet", ".parquet"]
    assert_equal_weights(result.folder, finished.folder)
    with Ledger.reader(result.folder) as ledger:
        stored = ledger.config()
    assert stored["data"]["path"].startswith(str(result.folder / "inputs" / "data-"))
    assert stored["reward"]["terms"][0]["path"].endswith(":first_digit")


def test_a_finished_run_is_returned_again(finished: lockstep.Result, home: Path) -> None:
    again = lockstep.train(
        values(home, "finished"),
        data=ROWS, evaluation_data=ROWS[:4], rewards=[first_digit, {"kind": "exact_match"}], resume=True,
    )  # fmt: skip
    assert again.metrics["reward/mean"][1:] == finished.metrics["reward/mean"][1:]
    with pytest.raises(
        lockstep.RunRefused, match="cannot resume with other inputs than it began with, and data differs"
    ):
        lockstep.train(
            values(home, "finished"), data=ROWS[1:], evaluation_data=ROWS[:4], rewards=first_digit, resume=True
        )
    with pytest.raises(lockstep.RunRefused, match="data and rewards of a resumed run are its own"):
        lockstep.train(data=ROWS, resume=finished.folder)


def test_a_run_that_is_refused_leaves_nothing(home: Path) -> None:
    with pytest.raises(lockstep.ConfigError, match="stepz"):
        lockstep.train({**values(home, "refused"), "stepz": 3}, data=ROWS, rewards=first_digit)
    with pytest.raises(lockstep.DataError):
        lockstep.train(values(home, "refused"), data=[{"speech": "1="}], rewards=first_digit)
    with pytest.raises(lockstep.DataError, match="row 1: not a JSON value"):
        lockstep.train(values(home, "refused"), data=[ROWS[0], {"prompt": object()}], rewards=first_digit)
    assert not (home / "runs" / "refused").exists()


def test_a_function_that_cannot_be_carried_is_refused(home: Path) -> None:
    with pytest.raises(lockstep.FunctionNotCarried, match=r"a lambda has no name .*use `def`"):
        lockstep.train(values(home, "refused"), data=ROWS, rewards=lambda completions, **columns: [0.0])
    bound = object()

    def closure(completions: list[str], **columns: Any) -> list[float]:
        return [float(id(bound)) for _ in completions]

    with pytest.raises(lockstep.FunctionNotCarried, match=r"closure: .*put the function into a file.py"):
        lockstep.train(values(home, "refused"), data=ROWS, rewards=closure)
    assert not (home / "runs" / "refused").exists()


@pytest.mark.slow
def test_a_callback_ends_the_run_early_and_it_resumes(finished: lockstep.Result, home: Path) -> None:
    seen: list[tuple[int, float]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> object:
        seen.append((step, metrics["reward/mean"]))
        with pytest.raises(lockstep.RunRefused, match="another training runs in this process"):
            lockstep.train(values(home, "inner"), data=ROWS, rewards=first_digit)
        return lockstep.STOP if step == 1 else None

    given: dict[str, Any] = {
        "data": ROWS, "evaluation_data": ROWS[:4], "rewards": [first_digit, {"kind": "exact_match"}],
    }  # fmt: skip
    result = lockstep.train(values(home, "stopped"), **given, on_step=on_step)
    assert result.steps == 1 and result.stopped_early is not None and "on_step returned STOP" in result.stopped_early
    assert (result.folder / "export" / "model.safetensors").is_file()
    result = lockstep.train(
        resume=result.folder, on_step=lambda step, metrics: seen.append((step, metrics["reward/mean"]))
    )
    assert [step for step, _ in seen] == [1, 2]
    assert [mean for _, mean in seen] == finished.metrics["reward/mean"][1:]
    assert_equal_weights(result.folder, finished.folder)


@pytest.mark.slow
def test_a_failing_callback_leaves_a_run_that_resumes(finished: lockstep.Result, home: Path) -> None:
    """Here in another thread than the main one, as a server would do it."""
    raised: list[lockstep.CallbackFailed] = []

    def fails(step: int, metrics: Mapping[str, float]) -> None:
        raise KeyError("dashboard")

    def run() -> None:
        try:
            given = values(home, "failing") | {"data": {"path": "?"}, "reward": {"terms": [{"kind": "exact_match"}]}}
            lockstep.train(
                check_config(given, "a config object"),
                data=ROWS, evaluation_data=ROWS[:4], rewards=[first_digit, {"kind": "exact_match"}], on_step=fails,
            )  # fmt: skip
        except lockstep.CallbackFailed as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    (error,) = raised
    assert "fails raised KeyError after step 1: 'dashboard'" in str(error) and isinstance(error.__cause__, KeyError)
    assert "resume with lockstep.train(resume=" in error.__notes__[0]
    with Ledger.reader(home / "runs" / "failing") as ledger:
        newest = ledger.newest_checkpoint()
    assert newest is not None and newest.step == 0
    assert_equal_weights(lockstep.train(resume=home / "runs" / "failing").folder, finished.folder)


SCRIPT = """
import re
import sys
import lockstep
import python_rewards

DIGIT = re.compile("[0-9]")


def right(text: str, answer: str) -> bool:
    return text.startswith(answer)


def own(completions, answer, **columns):
    base = python_rewards.first_digit(completions, answer)
    return [value if right(text, each) else 0.5 * bool(DIGIT.match(text))
            for value, text, each in zip(base, completions, answer)]


def show(step, metrics):
    print("step", step, flush=True)


"""


def script(home: Path, call: str) -> str:
    """A program without a guard for `__main__`."""
    return f"VALUES = {values(home, 'NAME')!r}\nROWS = {ROWS!r}\n{SCRIPT}{textwrap.dedent(call)}"


def program_environment() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.slow
def test_functions_of_a_command_are_copied(finished: lockstep.Result, home: Path) -> None:
    """`own` computes what `first_digit` does, with a helper, a pattern and a module of its own."""
    call = """
    VALUES["name"] = "command"
    terms = [{"kind": "function", "path": own, "name": "first_digit"}, {"kind": "exact_match"}]
    result = lockstep.train(VALUES, data=ROWS, evaluation_data=ROWS[:4], rewards=terms, on_step=show)
    print(result.metrics["reward/mean"][1:])
    """
    done = subprocess.run(
        [sys.executable, "-c", script(home, call)],
        cwd=home, env=program_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["step 1", "step 2", str(finished.metrics["reward/mean"][1:])]
    assert "step 2/2" in done.stderr, "the same lines as in a pipe"
    assert_equal_weights(home / "runs" / "command", finished.folder)


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_resumes(finished: lockstep.Result, home: Path) -> None:
    call = """
    import time
    VALUES["name"] = "interrupted"
    def wait(step, metrics):
        print("step", step, flush=True)
        time.sleep(1.5)
    terms = [{"kind": "function", "path": own, "name": "first_digit"}, {"kind": "exact_match"}]
    lockstep.train(VALUES, data=ROWS, evaluation_data=ROWS[:4], rewards=terms, on_step=wait)
    """
    file = home / "program.py"
    file.write_text(script(home, call))
    process = subprocess.Popen(
        [sys.executable, str(file)], cwd=home, env=program_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "step 1\n"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt: stopped after step 1 of 2; resume with lockstep.train(resume=" in errors, errors
    result = lockstep.train(resume=home / "runs" / "interrupted")
    assert result.steps == 2
    assert_equal_weights(result.folder, finished.folder)


def test_an_input_that_was_changed_is_refused(finished: lockstep.Result, tmp_path: Path) -> None:
    changed = shutil.copytree(finished.folder, tmp_path / "changed")
    (file,) = (changed / "inputs").glob("data-*.jsonl")
    file.write_text(file.read_text() + '{"prompt": "1=", "answer": "1"}\n')
    with pytest.raises(lockstep.RunRefused, match=r"1 input file of .* changed since the run began"):
        lockstep.train(resume=changed)


@pytest.mark.slow
def test_the_building_blocks_fit_together(finished: lockstep.Result) -> None:
    policy = lockstep.load_policy(finished.folder)
    assert policy.steps == 2 and policy.step == "2"
    groups = lockstep.generate(policy, ROWS[:3], n=4, temperature=1.0, max_tokens=4)
    assert [len(group.completions) for group in groups] == [4, 4, 4]
    scores = lockstep.score(groups, [first_digit, {"kind": "length", "soft": 1, "hard": 8}])
    assert scores.rewards.shape == (12,) and set(scores.terms) == {"first_digit", "length"}
    rewards = scores.rewards.reshape(3, 4)
    batch = lockstep.pack(groups, rewards - rewards.mean(1, keepdims=True), token_budget=64)
    assert batch.targets == sum(len(each.tokens) for group in groups for each in group.completions)
    assert sum(len(row.tokens) for rank in batch.everything().by_rank for row in rank) < sum(
        len(group.prompt.tokens) + len(each.tokens) for group in groups for each in group.completions
    )


@pytest.mark.slow
def test_an_export_generates_what_its_run_does(finished: lockstep.Result) -> None:
    texts = [
        lockstep.generate(source, [ROWS[0]["prompt"]], temperature=0.0, max_tokens=4)[0].completions[0].text
        for source in (finished.folder, finished.folder / "export")
    ]
    assert texts[0] == texts[1]
