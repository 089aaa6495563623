"""TRL's side of `benchmarks.step_losses`: `python -m benchmarks.trl_steps FOLDER`, with build/peer on the path.

`FOLDER/trl.json` has the arguments of each case; `FOLDER/trl-steps.json` gets the metrics that TRL logs of each step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS: dict[str, tuple[Any, Any]] = {
    "DPOTrainer": (DPOConfig, DPOTrainer),
    "CPOTrainer": (CPOConfig, CPOTrainer),
    "ORPOTrainer": (ORPOConfig, ORPOTrainer),
    "KTOTrainer": (KTOConfig, KTOTrainer),
    "RewardTrainer": (RewardConfig, RewardTrainer),
}


def steps(case: dict[str, Any]) -> list[dict[str, float]]:
    """Train as the case says; the metrics of each step."""
    config, trainer = TRAINERS[case["trainer"]]
    kind = AutoModelForSequenceClassification if case["trainer"] == "RewardTrainer" else AutoModelForCausalLM
    made = trainer(
        kind.from_pretrained(case["model"], dtype=torch.float32),
        args=config(**case["arguments"]),
        train_dataset=load_dataset("json", data_files=case["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(case["model"]),
    )
    made.train()
    return [row for row in made.state.log_history if "loss" in row]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "trl.json").read_text())
    found = {name: steps(case) for name, case in cases.items()}
    (folder / "trl-steps.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
