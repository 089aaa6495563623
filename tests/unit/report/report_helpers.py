"""A finished run with synthetic metrics of realistic shape and noise."""

import math
import random
from pathlib import Path

from lockstep.ledger import CompletionSample, Ledger

CONFIG = {
    "recipe": "grpo",
    "name": "grpo-sort",
    "folder": "runs",
    "seed": 0,
    "steps": 120,
    "model": {"path": "runs/sft-sort/export", "dtype": "float32"},
    "data": {"path": "examples/sort/train.jsonl"},
    "group_size": 8,
    "prompts_per_step": 32,
    "trainer": {"ranks": 2, "optimizer": {"lr": 3e-4, "betas": [0.9, 0.99]}},
}
PROMPTS = ["sort: 7 3 9 1 =", "sort: 4 4 2 8 0 =", "sort: 9 8 7 6 5 4 =", "sort: 2 1 ="]


def metrics_at(step: int, chance: random.Random) -> dict[str, float]:
    learned = 1 / (1 + math.exp(-(step - 35) / 12))
    noise = chance.gauss
    reward = min(1.0, max(0.0, 0.52 + 0.46 * learned + noise(0, 0.025)))
    return {
        "reward/mean": reward,
        "reward/std": max(0.02, 0.48 - 0.36 * learned + noise(0, 0.015)),
        "reward/exact_match/mean": reward,
        "reward/length/mean": -0.2 * (1 - learned) + noise(0, 0.01),
        "policy/loss": 0.02 * (1 - learned) + noise(0, 0.006),
        "policy/kl": 0.002 + 0.06 * learned + abs(noise(0, 0.003)),
        "policy/clip_low": abs(noise(0.01, 0.004)),
        "policy/clip_high": abs(noise(0.02, 0.007)),
        "policy/entropy": 0.62 - 0.45 * learned + noise(0, 0.012),
        "policy/grad_norm": math.exp(noise(-0.8 - learned, 0.25)),
        "policy/lr": 3e-4 * min(1.0, (step + 1) / 10),
        "rollout/length_mean": 9.5 + 2.1 * (1 - learned) + noise(0, 0.15),
        "rollout/length_max": float(round(16 + noise(0, 1))),
        "rollout/truncated": max(0.0, 0.08 * (1 - learned) + noise(0, 0.006)),
        "rollout/groups_without_signal": min(1.0, max(0.0, 0.15 + 0.7 * learned + noise(0, 0.04))),
        "policy/engine_gap_mean": math.exp(noise(-14.5, 0.2)),
        "policy/engine_gap_max": math.exp(noise(-12.2, 0.3)),
        "rollout/prompt_length_mean": 14.0 + noise(0, 0.2),
        "rollout/tokens": float(round(256 * (9.5 + 2.1 * (1 - learned)))),
        "time/rollout_s": 0.21 + abs(noise(0, 0.02)),
        "time/reward_s": 0.012,
        "time/train_s": 0.26 + abs(noise(0, 0.02)),
        "time/publish_s": 0.015,
        "time/evaluate_s": 0.4 if step % 20 == 19 else 0.0,
        "time/checkpoint_s": 0.01,
        "time/step_s": 0.5,
        "throughput/tokens_per_s": 5100 + noise(0, 220),
    }


def samples(step: int) -> list[CompletionSample]:
    shown = []
    for index, prompt in enumerate(PROMPTS):
        answer = " ".join(sorted(prompt.removeprefix("sort: ").removesuffix(" =").split()))
        right = step > 60 or index == 3
        completion = answer if right else answer[::-1] + (" 1 1 1 1 1 1" if index == 2 else "")
        finish = "length" if index == 2 and not right else "stop"
        scores = {"exact_match": float(right), "length": 0.0 if right else -0.25}
        shown.append(
            CompletionSample(prompt, completion, answer, float(right) + scores["length"], scores, f"0:{index}", finish)
        )
    return shown


def make_run(folder: Path, steps: int = 120, config: dict | None = None) -> Ledger:
    """Returns an open ledger with the metrics, evaluations and events of a run of `steps` steps."""
    chance = random.Random(0)
    ledger = Ledger.create(folder, config or CONFIG)
    ledger.record_event("started", ranks=2, engines=1)
    ledger.record_evaluation(-1, {"eval/exact_match": 0.531, "eval/length_mean": 11.4}, samples(0))
    for step in range(steps):
        ledger.record_metrics(step, metrics_at(step, chance))
        ledger.commit(step, {})
        if step % 20 == 19:
            exact = 0.53 + 0.46 / (1 + math.exp(-(step - 35) / 12))
            ledger.record_evaluation(step, {"eval/exact_match": exact, "eval/length_mean": 9.6}, samples(step))
            ledger.record_checkpoint(step, folder / "checkpoints" / f"{step + 1:08d}", exact)
            ledger.record_event("checkpoint", step=step + 1, path=f"checkpoints/{step + 1:08d}")
    return ledger
