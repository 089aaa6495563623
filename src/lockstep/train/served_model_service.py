"""The worker process of a served model: one rank, which the controller drives by remote calls."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.algorithm import ModelOutput
from lockstep.config.serve_role import ServeRole
from lockstep.data.micro_batch import EncodedMicroBatches, decode_micro_batches
from lockstep.train.rank_service import RankService, choose_packing
from lockstep.train.served_model import ServedModel, ServedModelAPI
from lockstep.train.trainer_api import RankInfo
from lockstep.train.trainer_kinds import SERVED_MODELS
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)


class ServedModelService(RankService, ServedModelAPI):
    """One rank of a served model.

    Args:
        role: the `ServeRole`, as `model_dump(mode="json")` returns it.
        images: the folder of the run's prepared images (`ImageStore`); None if the data has none.
        rank: the keyword arguments of `RankService`.
    """

    def __init__(self, role: dict[str, Any], images: str | None = None, **rank: Any) -> None:
        self.role = ServeRole.model_validate(role)
        super().__init__(self.role.name, self.role.threads, self.role.malloc, **rank)
        self.images = None if images is None else Path(images)
        self._model: ServedModel | None = None
        self._info: RankInfo | None = None

    def setup(self, names: list[str] | None = None) -> RankInfo:
        """Joins the other ranks and loads the model.

        Args:
            names: names and nodes of all ranks, to report which are missing.
        """
        if self._info is not None:
            return self._info
        current_beacon().stage("setup")
        ranks = self.join(names or (), self.role.collective_timeout_s, self.role.communication)
        self._model = model = SERVED_MODELS.create(self.role, ranks, self.images)
        packing, reason = choose_packing(self.role.model, model.probe_packing)
        self._info = RankInfo(
            rank=self.rank,
            world=self.world,
            device=str(self.device),
            compute_dtype=str(model.compute_dtype).removeprefix("torch."),
            packing=packing,
            packing_reason=reason,
            context_length=self.role.model.max_length or model.context_length,
            slower=ranks.slower,
        )
        log.info("rank %d of %d is ready on %s, packing %s: %s", self.rank, self.world, self.device, packing, reason)
        return self._info

    def info(self) -> RankInfo:
        if self._info is None:
            raise RuntimeError("the model is not set up; call setup() first")
        return self._info

    def evaluate(self, microbatches: EncodedMicroBatches, outputs: list[ModelOutput]) -> list[dict[str, np.ndarray]]:
        model = self._ready()
        current_beacon().stage("evaluate")
        return model.evaluate(decode_micro_batches(microbatches), outputs)

    def offload(self) -> None:
        self._ready().offload()

    def onload(self) -> None:
        self._ready().onload()

    def _ready(self) -> ServedModel:
        if self._model is None:
            raise RuntimeError("the model is not set up; call setup() first")
        return self._model

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None
