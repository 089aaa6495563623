"""A reward model in this process."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.model import ModelConfig
from lockstep.config.serve_role import ServeRole
from lockstep.data.forest_builder import forest_of_scored_texts
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.models.model_loader import load_tokenizer
from lockstep.run.step_scores import score_sequences
from lockstep.train.distributed import ParallelContext
from lockstep.train.rank_service import choose_packing
from lockstep.train.trainer_kinds import SERVED_MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

log = logging.getLogger(__name__)


class LocalRewardModel:
    """A reward model on one device; see `lockstep.run.step_scores.TargetEvaluator`.

    Args:
        token_budget: tokens per packed row; a longer text has a row of its own.
        threads: torch threads of this process; unchanged when absent.
        tokenizer: the model's, if it is loaded already.

    Raises:
        ModelError: the model cannot be used, or has no head for one score.
    """

    ranks = 1

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        token_budget: int,
        threads: int | None = None,
        tokenizer: "Tokenizer | None" = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        model = model.model_copy(update={"head": "score"})
        self.tokenizer = tokenizer or load_tokenizer(model)
        self._model = SERVED_MODELS.create(
            ServeRole(name="reward_model", model=model), ParallelContext(device=device), None
        )
        self.packing, reason = choose_packing(model, self._model.probe_packing)
        self.token_budget = token_budget
        possible = self._model.context_length - 1
        self.longest = min(model.max_length or possible, possible)
        """The longest text, in tokens: the target of a score has a place after the last one."""
        log.info("%s on %s, packing %s: %s", model.path, device, self.packing, reason)

    def evaluate_targets(self, batch: TrainingBatch, output: TrainerOutput) -> np.ndarray:
        """Returns the scores of all targets of a batch, float32 `[targets]`, in the batch's order."""
        assert output == "scores"
        everything = batch.everything()
        (rows,) = everything.by_rank
        values = self._model.evaluate(rows, [output])
        batch.set_field(output, everything, [[row[output] for row in values]])
        return batch.fields.pop(output)

    def score(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the score of each text, float64 `[texts]`.

        Args:
            texts: int32 `[tokens]` each, with 1 to `longest` tokens.
        """
        forest = forest_of_scored_texts(texts, range(len(texts)), [str(number) for number in range(len(texts))])
        budget = max(self.token_budget, max(text.size for text in texts) + 1)
        return score_sequences(self, pack(forest, self.ranks, budget, self.packing))
