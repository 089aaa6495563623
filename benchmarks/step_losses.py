"""Trains the same tiny model on the same pairs with TRL's trainers and with Lockstep, and compares each step's numbers.

    script/benchmark losses              two minutes; TRL is installed first
    script/benchmark losses --out FOLDER keeps `steps.json`, with every number of both, and `table.md`

Both use the same rows in the same order, AdamW with the same learning rate, float32, and no dropout. TRL's step is one
micro-batch in one process. Lockstep's is divided over two ranks, into rows of at most 256 tokens.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import facts, footnote
from benchmarks.runner import Tell, call, train
from benchmarks.workloads import LETTERS, Side
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

STEPS, BATCH, LIMIT_S = 4, 16, 900.0
LEARNING_RATE = 1e-3
BOUND = 1e-4
"""The largest relative difference that is not a difference of definitions: float32 sums in another order."""
STEPS_FILE = "steps.json"

REWARDS = {name: name for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")}
LOGPS = {name: name for name in ("logps/chosen", "logps/rejected")}
SCORES = {name: f"policy/{name}" for name in ("accuracy", "margin", "mean_reward")}
Numbers = list[dict[str, float]]
"""The metrics of each step."""


@dataclass(frozen=True, slots=True)
class Case:
    """One loss, in the words of both."""

    title: str
    trainer: str
    """The class of TRL."""
    arguments: Mapping[str, Any]
    """Of its config, in addition to those of all cases."""
    loss: Mapping[str, Any]
    """Lockstep's `loss`."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics with the same definition, TRL's name and Lockstep's, in addition to the loss and the gradient's norm."""
    note: str = ""
    """What has another definition, and is not compared."""
    data: str = "pairs"


CPO_NOTE = "rewards/* and logps/* of TRL are means over tokens, here sums"
CASES: dict[str, Case] = {
    "dpo": Case("DPO", "DPOTrainer", {"loss_type": ["sigmoid"]}, {"type": "sigmoid"}, REWARDS | LOGPS),
    "ipo": Case("IPO", "DPOTrainer", {"loss_type": ["ipo"]}, {"type": "ipo"}, REWARDS | LOGPS),
    "mpo": Case(
        "MPO: sigmoid, bco_pair and sft",
        "DPOTrainer",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"type": "mpo"},
        REWARDS | LOGPS,
    ),
    "wpo": Case(
        "DPO with WPO's weights",
        "DPOTrainer",
        {"loss_type": ["sigmoid"], "use_weighting": True},
        {"type": "sigmoid", "use_weighting": True},
        REWARDS | LOGPS,
    ),
    "cpo": Case(
        "CPO", "CPOTrainer", {"loss_type": "sigmoid"}, {"type": "cpo"}, REWARDS | LOGPS | {"nll_loss": "loss/sft"}
    ),
    "simpo": Case(
        "SimPO",
        "CPOTrainer",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
        {"type": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
        note=CPO_NOTE,
    ),
    "orpo": Case("ORPO", "ORPOTrainer", {}, {"type": "orpo"}, {"nll_loss": "loss/nll"}, CPO_NOTE),
    "kto": Case(
        "KTO",
        "KTOTrainer",
        {"desirable_weight": 1.0, "undesirable_weight": 1.2},
        {"type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.2},
        {name: name for name in ("rewards/chosen", "rewards/rejected", "rewards/margins")} | {"kl": "policy/kl"},
        data="labelled",
    ),
    "reward": Case("reward model", "RewardTrainer", {}, {}, SCORES),
    "reward-margin": Case(
        "reward model with margins and centering",
        "RewardTrainer",
        {"center_rewards_coefficient": 0.01},
        {"use_margin": True, "center_rewards_coefficient": 0.01},
        SCORES,
        data="margins",
    ),
}


def prepare(folder: Path) -> None:
    """Write a language model, a reward model made from it, and the data of four steps."""
    import torch  # only here, so that --help is fast
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = make_tiny(folder / "model", hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, max_length=128, seed=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(scorer.score.weight, std=0.5)
    scorer.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "scorer")
    draw = np.random.default_rng(12)

    def text(longest: int) -> str:
        return "".join(draw.choice(list(LETTERS), size=int(draw.integers(2, longest))))

    pairs = [{"prompt": text(20), "chosen": text(40), "rejected": text(40)} for _ in range(STEPS * BATCH)]
    margins = [{**pair, "margin": 0.25 * float(draw.integers(0, 4))} for pair in pairs]
    # Prompts are equally long, so that no mismatched completion is cut: TRL cuts those at `max_length`, Lockstep at the
    # length of the longest sample. Most completions are desirable, so that KTO's KL is above zero.
    labelled = [
        {"prompt": pair["prompt"].ljust(20, "."), "completion": pair["chosen"], "label": bool(draw.random() < 0.8)}
        for pair in pairs
    ]
    for name, rows in (("pairs", pairs), ("margins", margins), ("labelled", labelled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(case: Case) -> str:
    return "scorer" if case.trainer == "RewardTrainer" else "model"


def of_trl(cases: Mapping[str, Case], folder: Path) -> dict[str, Numbers]:
    """TRL's numbers."""
    common = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "bf16": False,
        "gradient_checkpointing": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_grad_norm": 1.0,
        "weight_decay": 0.0, "train_sampling_strategy": "sequential", "logging_steps": 1, "max_length": 128,
    }  # fmt: skip
    orders = {
        name: {
            "trainer": case.trainer,
            "model": str(folder / model_of(case)),
            "data": str(folder / f"{case.data}.jsonl"),
            "arguments": {"output_dir": str(folder / "trl" / name), **common, **case.arguments},
        }
        for name, case in cases.items()
    }
    (folder / "trl.json").write_text(json.dumps(orders))
    call([sys.executable, "-m", "benchmarks.trl_steps", str(folder)], Side("trl", "trl"), LIMIT_S)
    found: dict[str, Numbers] = json.loads((folder / "trl-steps.json").read_text())
    return found


def of_lockstep(name: str, case: Case, folder: Path) -> Numbers:
    """Lockstep's numbers."""
    config = {
        "recipe": "reward" if case.trainer == "RewardTrainer" else "preference",
        "name": name,
        "folder": str(folder / "lockstep"),
        "steps": STEPS,
        "batch_size": BATCH,
        "token_budget": 256,
        "model": {"path": str(folder / model_of(case))},
        "data": {"path": str(folder / f"{case.data}.jsonl"), "shuffle": False},
        "loss": dict(case.loss),
        "trainer": {
            "ranks": 2, "threads": 1, "max_grad_norm": 1.0,
            "optimizer": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "checkpoint": {"every": 0, "export": False},
        "report": {"console": False, "html": False, "tensorboard": False},
        "cluster": {"kind": "local", "device": "cpu"},
    }  # fmt: skip
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    train(file, LIMIT_S)
    with Ledger.reader(folder / "lockstep" / name) as ledger:
        return [dict(row.values) for row in ledger.metrics_rows()]


def differences(case: Case, trl: Numbers, lockstep: Numbers) -> dict[str, float]:
    """The largest difference of each metric over the steps, relative to the largest value of the metric: rewards are
    zero before the first step."""
    names = {"loss": "policy/loss", "grad_norm": "policy/grad_norm", **case.metrics}
    found = {}
    for theirs, ours in names.items():
        a, b = (np.array([row[name] for row in rows]) for rows, name in ((trl, theirs), (lockstep, ours)))
        if a.shape != (STEPS,) or b.shape != (STEPS,):
            raise ValueError(f"{case.title}: {theirs} of {len(a)} and {len(b)} steps, expected {STEPS}")
        found[theirs] = float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-12))
    return found


def compare(cases: Mapping[str, Case], folder: Path, tell: Tell) -> dict[str, dict[str, Any]]:
    """Runs both on all cases: the numbers of each, and the differences."""
    prepare(folder)
    tell(f"TRL: {', '.join(cases)}")
    trl, found = of_trl(cases, folder), {}
    for name, case in cases.items():
        tell(f"Lockstep: {name}")
        ours = of_lockstep(name, case, folder)
        found[name] = {"trl": trl[name], "lockstep": ours, "differences": differences(case, trl[name], ours)}
    return found


def table(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """The comparison, in Markdown."""
    lines = [
        "| loss | TRL's trainer | loss of the steps, TRL | Lockstep | largest difference of the loss | of all that is "
        "compared | compared |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in results.items():
        case, differ = CASES[name], each["differences"]
        trl, ours = (
            ", ".join(f"{row[key]:.6f}" for row in each[side])
            for side, key in (("trl", "loss"), ("lockstep", "policy/loss"))
        )
        what = ", ".join(f"`{metric}`" for metric in differ) + (f" ({case.note})" if case.note else "")
        numbers = f"{differ['loss']:.0e} | {max(differ.values()):.0e}"
        lines.append(f"| {case.title} | `{case.trainer}` | {trl} | {ours} | {numbers} | {what} |")
    return lines


def main(out: Path, tell: Tell) -> None:
    """Compares all cases. Exits with 1 if a difference is larger than `BOUND`."""
    made = facts()
    with tempfile.TemporaryDirectory(prefix="lockstep-losses-") as scratch:
        results = compare(CASES, Path(scratch), tell)
    out.mkdir(parents=True, exist_ok=True)
    (out / STEPS_FILE).write_text(json.dumps({"made": made, **results}, indent=1) + "\n")
    text = "\n".join([*table(results), "", footnote([made], [])]) + "\n"
    (out / "table.md").write_text(text)
    print(text)
    too_large = [name for name, each in results.items() if max(each["differences"].values()) > BOUND]
    if too_large:
        raise SystemExit(f"different by more than {BOUND:g}: {', '.join(too_large)}")
