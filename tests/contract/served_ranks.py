"""Ranks of a served model as real processes, and trainer ranks that hold the same model as their reference."""

from pathlib import Path
from typing import Any

import numpy as np
import trainer_ranks as tr

from lockstep.config.recipes import GRPOConfig
from lockstep.config.serve_role import ServeRole
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.served_model_service import ServedModelService

POLICY_RANKS = 2
BUDGETS = {"one row": 400, "rows": 30}
"""Token budgets: the whole batch in a row or two, and eleven micro-batches per rank of the policy."""


def config(folder: Path, family: str, **changes: Any) -> GRPOConfig:
    made = tr.config(folder, family, "grpo")
    return GRPOConfig.model_validate({**made.model_dump(mode="json"), "reference": {"threads": 1, **changes}})


def role(folder: Path, family: str, **changes: Any) -> ServeRole:
    return config(folder, family, **changes).serve_roles[0]


def batch(folder: Path, family: str, budget: int) -> TrainingBatch:
    return tr.batch_of(tr.config(folder, family, "grpo"), POLICY_RANKS, budget)


def per_target(batch: TrainingBatch, minibatch: MiniBatch, values: list[Any], output: str) -> np.ndarray:
    """One rank's values by the number of their target; NaN for those of other ranks."""
    found = np.full(batch.targets, np.nan, np.float32)
    for row, of_row in zip(minibatch, values, strict=True):
        assert of_row[output].shape == row.index.shape
        found[row.index[row.index >= 0]] = of_row[output][row.index >= 0]
    return found


def held(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """The reference on the policy's own ranks."""
    result = tr.Result(ranks.rank)
    for family in tr.FAMILIES:
        trainer = FSDP2Trainer(tr.config(folder, family, "grpo").policy, ranks)
        for name, budget in BUDGETS.items():
            made = batch(folder, family, budget)
            mine = made.everything().by_rank[ranks.rank]
            values = trainer.evaluate(mine, ["reference_logprobs"])
            result.extra[family, name] = per_target(made, mine, values, "reference_logprobs")
    return result


def served(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """The same model in a service of its own, on any number of ranks."""
    result = tr.Result(ranks.rank)
    ranks.leave()
    for start, family in enumerate(tr.FAMILIES):
        service = ServedModelService(
            role(folder, family, ranks=ranks.world).model_dump(mode="json"),
            rank=ranks.rank, world=ranks.world, store=f"tcp://127.0.0.1:{port}", device="cpu",
            generation=2, restarts=start,
        )  # fmt: skip
        info = service.setup([f"reference-{rank}" for rank in range(ranks.world)])
        assert service.setup() == service.info() == info
        result.extra[family, "info"] = info
        for name, budget in BUDGETS.items():
            made = batch(folder, family, budget)
            minibatch = made.everything().spread(ranks.world)
            values = service.evaluate([*minibatch.encode()][ranks.rank], ["logprobs", "entropy"])
            mine = minibatch.by_rank[ranks.rank]
            result.extra[family, name] = per_target(made, mine, values, "logprobs")
            result.extra[family, name, "rows"] = len(mine)
            result.extra[family, name, "entropy"] = per_target(made, mine, values, "entropy")
        service.close()
    return result


CASES: dict[str, tr.Case] = {"held": held, "served": served}
