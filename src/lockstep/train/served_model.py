"""The protocol of a served model within one rank, and the remote calls that the controller makes to its ranks.

`lockstep.train.served_model_service.ServedModelService` implements the calls. Every call goes to all ranks of the role
in the same order, because the ranks enter collectives in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lockstep.config.algorithm import ModelOutput
from lockstep.config.serve_role import ServeRole
from lockstep.data.micro_batch import EncodedMicroBatches, MicroBatch
from lockstep.models.model_facts import ModelFacts
from lockstep.train.trainer_api import RankInfo
from lockstep.train.trainer_plan import PlannedCollective

if TYPE_CHECKING:
    from lockstep.models.packing_probe import PackingProbeResult


class ServedModel(Protocol):
    """One rank of a model without a trainer. Every rank gets the same sequence of calls with the same number of
    micro-batches, so that all ranks enter the same collectives."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision of the forward."""

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""

    def probe_packing(self) -> "PackingProbeResult":
        """Finds out how rows may be packed for the model. All ranks call it."""

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[ModelOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the outputs of each micro-batch, float32 `[targets]`, without gradients. Raises RuntimeError while
        the weights are in host memory."""

    def offload(self) -> None:
        """Moves the weights to host memory, so that another role can use the device's memory."""

    def onload(self) -> None:
        """Moves the weights back to the device."""

    def close(self) -> None:
        """Leaves the communicators."""


class ServedModelPlanner(Protocol):
    """Estimates what the ranks of a served role need."""

    def memory(self, role: ServeRole, model: ModelFacts, token_budget: int) -> int:
        """Estimates the bytes that one rank needs on its device, without the libraries."""

    def collectives(self, role: ServeRole, model: ModelFacts) -> list[PlannedCollective]:
        """Lists the collectives that every rank enters in an evaluation. They do not depend on a rank's data."""


class ServedModelAPI(ABC):
    """The calls to one rank. They carry no tensors of the model."""

    @abstractmethod
    def setup(self, names: list[str] | None = None) -> RankInfo:
        """Joins the communicator and loads the model. Raises a ValueError, such as ModelError, if it cannot be loaded.

        Args:
            names: the name and node of every rank, for the error about ranks that do not join.
        """

    @abstractmethod
    def info(self) -> RankInfo:
        """Returns what `setup` returned."""

    @abstractmethod
    def evaluate(self, microbatches: EncodedMicroBatches, outputs: list[ModelOutput]) -> list[dict[str, np.ndarray]]:
        """Returns the requested values of each micro-batch, float32 `[targets]`, computed without gradients."""

    @abstractmethod
    def offload(self) -> None:
        """Moves the weights to host memory. Idempotent."""

    @abstractmethod
    def onload(self) -> None:
        """Moves the weights back to the device. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the communicator."""
