"""Prepares a small project for `lockstep train`, signals its workers, and copies what the run left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REWARDS = '''"""Rewards of the copied digit."""

import time

TABLE = {str(n): n / 9 for n in range(10)}
SEEN = [0]


def first_digit(prompts, completions, answer, **kwargs):
    return [TABLE[each[0]] if each[:1].isdigit() else 0.0 for each in completions]


def lookup(prompts, completions, answer, **kwargs):
    return [TABLE[each[0]] for each in completions]


def judged(prompts, completions, answer, **kwargs):
    SEEN[0] += 1
    time.sleep(12.0 if SEEN[0] % 4 == 0 else 0.5)
    return first_digit(prompts, completions, answer)
'''


def prepare(options):
    """Writes model, data, rewards and run.yaml. Options: `reward=NAME steps=N bad_row=N data=... trainer.x=...`."""
    given = dict(each.split("=", 1) for each in options)
    command = "tiny model --hidden 32 --layers 2 --heads 2 --kv-heads 1 --ffn 64 --max-length 32 --alphabet 0123456789="
    subprocess.run(["lockstep", *command.split()], check=True, stdout=subprocess.DEVNULL)
    Path("rewards.py").write_text(REWARDS)
    Path("data").mkdir()
    rows = [f"{7 * n % 100:02d}" for n in range(60)]
    lines = [json.dumps({"prompt": f"{n}=", "answer": n[0], "completion": n[0]}) for n in rows]
    if "bad_row" in given:
        lines[int(given["bad_row"])] = lines[int(given["bad_row"])][:-9]
    Path("data/train.jsonl").write_text("\n".join(lines) + "\n")
    recipe = given.get("recipe", "grpo")
    body = [
        f"recipe: {recipe}", "name: copy-digit", "seed: 5", f"steps: {given.get('steps', 14)}", "model: {path: model}",
        f"data: {{path: {given.get('data', 'data/train.jsonl')}}}", "token_budget: 256",
        f"trainer: {{ranks: 2, threads: 1, optimizer: {{lr: {given.get('lr', '1.0e-3')}}}}}",
        "checkpoint: {every: 4}", "report: {tensorboard: false, html: false}",
    ]  # fmt: skip
    if recipe == "grpo":
        body += [
            "prompts_per_step: 4", "group_size: 4", "rollout: {sampling: {max_tokens: 4}, engine: {threads: 1}}",
            f"reward: {{terms: [{{kind: function, path: 'rewards.py:{given.get('reward', 'first_digit')}'}}]}}",
        ]  # fmt: skip
    else:
        body.append("batch_size: 16")
    Path("run.yaml").write_text("\n".join(body) + "\n")


def strike(worker, step, name):
    """Sends a signal to a worker once the run has done so many steps."""
    from lockstep.base.folders import run_shm_dir
    from lockstep.watch.beacon.reader import read_beacon

    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            run = Path("runs/copy-digit/run-id").read_text().strip()
            controller = read_beacon(run_shm_dir(run) / "controller.beacon", events=False)
            if controller.counters["step"].value >= int(step):
                victim = read_beacon(run_shm_dir(run) / f"{worker}.beacon", events=False)
                os.kill(victim.pid, getattr(signal, name))
                return
        except (OSError, AttributeError, KeyError, ValueError):
            continue


def collect(target):
    """Copies the small text files of the run."""
    run = Path("runs/copy-digit")
    for path in sorted(run.rglob("*")):
        texts = (".log", ".json", ".jsonl", ".yaml", ".md", ".txt")
        if (
            path.is_file()
            and path.suffix in texts
            and path.stat().st_size < 20_000
            and "export" not in path.parts
            and "checkpoints" not in path.parts
        ):
            place = Path(target) / path.relative_to(run.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)


if __name__ == "__main__":
    {
        "prepare": lambda: prepare(sys.argv[2:]),
        "strike": lambda: strike(*sys.argv[2:]),
        "collect": lambda: collect(sys.argv[2]),
    }[sys.argv[1]]()
