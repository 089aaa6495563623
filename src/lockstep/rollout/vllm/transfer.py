"""Weights from the store into a worker of vLLM, over vLLM's weight-transfer interface.

Importing this module registers the backend. vLLM imports it in every one of its workers, as `Worker` is their extension
class, so that with tensor parallelism each worker reads the shared memory itself and takes its own shard of it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lockstep.rollout.errors import WeightsMismatch
from lockstep.rollout.taking import ReaderSource, WeightReader, open_reader

BACKEND = "lockstep"


class Worker:
    """The extension of vLLM's workers: it makes them import this module, and adds nothing."""


@dataclass
class StoreInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Once: who reads the store."""

    reader: ReaderSource


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Each time: where the store is, and the version that must be current in it."""

    folder: str
    version: int


class StoreTransfer(WeightTransferEngine[StoreInit, StoreUpdate]):  # type: ignore[misc]
    """Takes a version whole, in one call."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate

    _reader: WeightReader | None = None

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        self._reader = open_reader(init_info.reader)

    def start_weight_update(self) -> None:
        """Nothing yet: the model is taken apart when the version is there and held."""

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Raises WeightsMismatch where vLLM's model has parameters that got nothing."""
        assert self._reader is not None
        wanted = {name for name, _ in self.model.named_parameters()}
        with self._reader(Path(update_info.folder), update_info.version) as tensors:
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)
        if loaded is not None and self.model_config.quantization is None and wanted - set(loaded):
            raise WeightsMismatch((), sorted(wanted - set(loaded)))

    def finish_weight_update(self) -> None:
        """Nothing: the version is in."""

    def shutdown(self) -> None:
        self._reader = None


@torch.no_grad()
def pack_tied_heads(model: nn.Module) -> None:
    """Makes the packed copies of output layers again whose weight is that of the embedding. vLLM's reload packs each
    weight for the layer that loads it, here the embedding, and the output layer's copy stays that of the old one."""
    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embedded = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embedded:
            layer.quant_method.process_weights_after_loading(layer)


WeightTransferEngineFactory.register_engine(BACKEND, StoreTransfer)
