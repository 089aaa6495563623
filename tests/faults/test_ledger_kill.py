"""A writer is killed at any moment: everything reported as durable is complete, and nothing else is visible."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ledger"))

from ledger_helpers import CONFIG, assert_same, make_completion, make_rollouts

from lockstep.ledger import Ledger

WRITER = """
import os, sys
from pathlib import Path
from ledger_helpers import make_completion, make_rollouts
from lockstep.ledger import Ledger

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

with Ledger.resume(Path(sys.argv[1])) as ledger:
    say("generation", ledger.generation)
    step = ledger.last_committed_step() + 1
    while True:
        if ledger.rollouts(step) is None:
            have = {one.request for one in ledger.kept_completions(step)}
            for k in range(4):
                if f"{step}/{k}" not in have:
                    ledger.keep(step, [make_completion(f"{step}/{k}", 6, step * 10 + k)])
                    say("kept", step, k)
            ledger.record_rollouts(step, make_rollouts(step), {"packing_seed": step})
            say("collected", step)
        ledger.record_metrics(step, {"x": step})
        ledger.commit(step, {"loss": step})
        say("committed", step)
        ledger.record_published(step + 1)
        if step % 3 == 2:
            ledger.record_checkpoint(step, Path(sys.argv[1]) / "checkpoints" / str(step))
            ledger.delete_unneeded_steps()
        step += 1
"""


def run_and_kill(folder: Path, words: int, seconds: float) -> list[tuple[str, ...]]:
    """Kill the writer a moment after it has reported `words` operations; returns the reported operations."""
    environment = {**os.environ, "PYTHONPATH": writer_functions()}
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        reports = b"".join(process.stdout.readline() for _ in range(words))
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        reports += process.stdout.read()
        assert process.wait(timeout=30) == -signal.SIGKILL, reports
    return [tuple(line.split()) for line in reports.decode().splitlines()]


def writer_functions() -> str:
    return str(Path(__file__).parents[1] / "unit" / "ledger")


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    folder = tmp_path / "run"
    Ledger.create(folder, CONFIG).close()
    chance = random.Random(0)
    collected, committed, kept, generation = -1, -1, {}, 1
    for _ in range(16):
        reports = run_and_kill(folder, chance.randint(1, 40), chance.random() * 0.01)
        generation += 1
        assert reports[0] == ("generation", str(generation))
        for kind, *numbers in reports[1:]:
            step = int(numbers[0])
            if kind == "collected":
                assert step == collected + 1, "a step was collected twice or skipped"
                collected = step
            elif kind == "committed":
                committed = step
            else:
                kept.setdefault(step, []).append(int(numbers[1]))
        with Ledger.reader(folder) as reader:  # no writer runs: the ledger is as it was left
            visible = reader.last_committed_step()
            assert committed <= visible <= committed + 1
        with Ledger.resume(folder) as ledger:
            generation += 1
            collected, committed = check(ledger, collected, committed, kept)
    assert committed > 20, "the writer hardly worked"
    every = [k for step in range(collected + 1) for k in sorted(kept.get(step, []))]
    assert len(every) >= 4 * committed // 2


def check(ledger: Ledger, collected: int, committed: int, kept: dict[int, list[int]]) -> tuple[int, int]:
    """Compare the ledger with the writer's reports; the kill may have cut off one report."""
    steps = ledger.collected_steps()
    assert steps == list(range(len(steps))) and len(steps) - 1 in (collected, collected + 1)
    assert ledger.last_committed_step() in (committed, committed + 1) and ledger.last_committed_step() <= len(steps) - 1
    assert ledger.published_version() <= ledger.last_committed_step() + 1
    newest = [row.step for row in ledger.checkpoints()]
    needed = range(newest[-2] + 1 if len(newest) > 1 else 0, len(steps))
    for step in needed:
        stored = ledger.stored_step(step)
        assert stored is not None
        assert_same(stored.rollouts, make_rollouts(step))
        assert stored.extra == {"packing_seed": step}
    assert [row.step for row in ledger.commits()] == list(range(ledger.last_committed_step() + 1))
    assert len(ledger.prompts_used()) == 3 * len(steps)
    partial = ledger.kept_completions(len(steps))
    reported = len(kept.get(len(steps), []))
    assert len(partial) in (reported, reported + 1)
    assert_same(partial, [make_completion(f"{len(steps)}/{k}", 6, len(steps) * 10 + k) for k in range(len(partial))])
    present = sorted(path.name for path in (ledger.folder / "steps").iterdir())
    extra = [name for name in present if name.startswith(".") or name.endswith(".rejected")]
    assert extra == [] and not {ledger.step_path(step).name for step in needed} - set(present)
    if len(partial) == reported + 1:
        kept.setdefault(len(steps), []).append(reported)
    return len(steps) - 1, ledger.last_committed_step()


def test_killed_while_the_run_is_created(tmp_path):
    """Either there is no run, or a complete one."""
    code = (
        "import sys; from pathlib import Path; from ledger_helpers import CONFIG; from lockstep.ledger import Ledger\n"
        "print('ready', flush=True)\n"
        "for i in range(10**6): Ledger.create(Path(sys.argv[1]) / f'r{i}', CONFIG).close()"
    )
    complete_runs = 0
    for attempt in range(6):
        runs = tmp_path / str(attempt)
        environment = {**os.environ, "PYTHONPATH": writer_functions()}
        with subprocess.Popen(
            [sys.executable, "-c", code, str(runs)], stdout=subprocess.PIPE, env=environment
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(random.Random(attempt).random() * 0.2)
            writer.kill()
            writer.wait(timeout=30)
        for folder in runs.glob("[!.]*") if runs.exists() else ():
            with Ledger.resume(folder) as ledger:
                assert ledger.config() == CONFIG and ledger.last_committed_step() == -1
            complete_runs += 1
    assert complete_runs > 0
