"""A writer that is killed at any moment: what it was told is durable is there, whole; nothing else is visible."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ledger"))

from ledger_helpers import CONFIG, assert_same, make_completion, make_rollouts

from lockstep.ledger import Ledger

WRITER = """
import os, sys
from pathlib import Path
from ledger_helpers import make_completion, make_rollouts
from lockstep.ledger import Ledger, step_file

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

step_file.rollouts_table(make_rollouts(0), {})  # pyarrow imports pandas at its first array
with Ledger.resume(Path(sys.argv[1])) as ledger:
    say("generation", ledger.generation)
    step = ledger.committed() + 1
    while True:
        if ledger.rollouts(step) is None:
            have = {one.request for one in ledger.kept(step)}
            for k in range(4):
                if f"{step}/{k}" not in have:
                    ledger.keep(step, [make_completion(f"{step}/{k}", 6, step * 10 + k)])
                    say("kept", step, k)
            ledger.collected(step, make_rollouts(step), {"packing_seed": step})
            say("collected", step)
        ledger.metrics(step, {"x": step})
        ledger.commit(step, {"loss": step})
        say("committed", step)
        ledger.published(step + 1)
        if step % 3 == 2:
            ledger.checkpoint(step, Path(sys.argv[1]) / "checkpoints" / str(step))
            ledger.retain()
        step += 1
"""


def run_and_kill(folder: Path, words: int, seconds: float) -> list[tuple[str, ...]]:
    """Lets the writer say so many things, and work a moment longer; kills it; returns what it said it had done."""
    environment = {**os.environ, "PYTHONPATH": helpers()}
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        said = b"".join(process.stdout.readline() for _ in range(words))
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read()
        assert process.wait(timeout=30) == -signal.SIGKILL, said
    return [tuple(line.split()) for line in said.decode().splitlines()]


def helpers() -> str:
    return str(Path(__file__).parents[1] / "unit" / "ledger")


def test_killed_at_random_moments(tmp_path):
    folder = tmp_path / "run"
    Ledger.create(folder, CONFIG).close()
    chance = random.Random(0)
    collected, committed, kept, generation = -1, -1, {}, 1
    for _ in range(16):
        said = run_and_kill(folder, chance.randint(1, 40), chance.random() * 0.01)
        generation += 1
        assert said[0] == ("generation", str(generation))
        for kind, *numbers in said[1:]:
            step = int(numbers[0])
            if kind == "collected":
                assert step == collected + 1, "a step was collected twice or skipped"
                collected = step
            elif kind == "committed":
                committed = step
            else:
                kept.setdefault(step, []).append(int(numbers[1]))
        with Ledger.reader(folder) as reader:  # beside nobody: as it was left
            seen = reader.committed()
            assert committed <= seen <= committed + 1
        with Ledger.resume(folder) as ledger:
            generation += 1
            collected, committed = check(ledger, collected, committed, kept)
    assert committed > 20, "the writer hardly worked"
    every = [k for step in range(collected + 1) for k in sorted(kept.get(step, []))]
    assert len(every) >= 4 * committed // 2


def check(ledger: Ledger, collected: int, committed: int, kept: dict[int, list[int]]) -> tuple[int, int]:
    """Holds the ledger against what the writer had been told; the kill may have cut off one word of it."""
    steps = ledger.collected_steps()
    assert steps == list(range(len(steps))) and len(steps) - 1 in (collected, collected + 1)
    assert ledger.committed() in (committed, committed + 1) and ledger.committed() <= len(steps) - 1
    assert ledger.published_version() <= ledger.committed() + 1
    newest = [row.step for row in ledger.checkpoints()]
    needed = range(newest[-2] + 1 if len(newest) > 1 else 0, len(steps))
    for step in needed:
        stored = ledger.stored(step)
        assert stored is not None
        assert_same(stored.rollouts, make_rollouts(step))
        assert stored.extra == {"packing_seed": step}
    assert [row.step for row in ledger.commits()] == list(range(ledger.committed() + 1))
    assert len(ledger.prompts_used()) == 3 * len(steps)
    partial = ledger.kept(len(steps))
    told = len(kept.get(len(steps), []))
    assert len(partial) in (told, told + 1)
    assert_same(partial, [make_completion(f"{len(steps)}/{k}", 6, len(steps) * 10 + k) for k in range(len(partial))])
    present = sorted(path.name for path in (ledger.folder / "steps").iterdir())
    extra = [name for name in present if name.startswith(".") or name.endswith(".rejected")]
    assert extra == [] and not {f"{step:08d}.arrow" for step in needed} - set(present)
    if len(partial) == told + 1:
        kept.setdefault(len(steps), []).append(told)
    return len(steps) - 1, ledger.committed()


def test_killed_while_the_run_is_made(tmp_path):
    """Either there is no run, or a whole one."""
    code = (
        "import sys; from pathlib import Path; from ledger_helpers import CONFIG; from lockstep.ledger import Ledger\n"
        "print('ready', flush=True)\n"
        "for i in range(10**6): Ledger.create(Path(sys.argv[1]) / f'r{i}', CONFIG).close()"
    )
    whole = 0
    for attempt in range(6):
        runs = tmp_path / str(attempt)
        environment = {**os.environ, "PYTHONPATH": helpers()}
        with subprocess.Popen(
            [sys.executable, "-c", code, str(runs)], stdout=subprocess.PIPE, env=environment
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(random.Random(attempt).random() * 0.2)
            writer.kill()
            writer.wait(timeout=30)
        for folder in runs.glob("[!.]*") if runs.exists() else ():
            with Ledger.resume(folder) as ledger:
                assert ledger.config() == CONFIG and ledger.committed() == -1
            whole += 1
    assert whole > 0
