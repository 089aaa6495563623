"""Loads weights into a worker of vLLM over vLLM's weight-transfer interface.

Importing this module registers the backend. vLLM imports it in every one of its workers, as `WorkerExtension` is
their extension class, so that with tensor parallelism each worker reads the shared memory itself and loads its own
shard.
"""

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from lockstep.rollout.errors import WeightsMismatch
from lockstep.rollout.vllm.direct_loading import TensorMove, apply_tensor_moves, plan_tensor_moves
from lockstep.rollout.weight_loading import (
    ExpectedParameters,
    ReaderSource,
    WeightReader,
    WeightReceiver,
    open_reader,
    open_receiver,
    publish_worker_progress,
)

try:
    from vllm.utils.nccl import unpinned_nccl_env
except ImportError:  # an older vLLM, which sets nothing
    unpinned_nccl_env = contextlib.nullcontext

log = logging.getLogger(__name__)

BACKEND = "lockstep"

# vLLM's layerwise reload warns about layers without tensors of their own, such as tied heads. The warning is not
# needed: missing parameters raise WeightsMismatch.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update in one worker."""

    touched: bool
    """Whether any weight of the worker may have changed."""
    error: Exception | None = None


class WorkerExtension:
    """The extension of vLLM's workers. It makes them import this module."""

    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def take_weights(self, info: dict[str, Any], progress_file: str = "") -> UpdateResult:
        """Does a whole update and writes its progress to `progress_file`.

        Errors are returned, not raised: for an exception in a tensor-parallel worker vLLM keeps only its text, and
        would take the other workers' replies for replies to the next call.
        """
        transfer = self.weight_transfer_engine
        transfer.touched = False
        try:
            with publish_worker_progress(progress_file, transfer.parallel_config.rank):
                self.start_weight_update()
                self.update_weights(info)
                self.finish_weight_update()
        except Exception as error:
            log.exception("the update failed")
            return UpdateResult(transfer.touched, _picklable(error))
        return UpdateResult(True)


@dataclass
class StoreInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The reader of the store, and the parameters that a version must have; set once."""

    reader: ReaderSource
    expected: ExpectedParameters


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The store and the version that must be current in it, or the description of a stream from a device."""

    version: int
    folder: str = ""
    stream: dict[str, Any] | None = None


class LockstepTransferEngine(WeightTransferEngine[StoreInit, StoreUpdate]):  # type: ignore[misc]
    """vLLM's weight-transfer engine for Lockstep's shared-memory store and streams. It loads a version in one call."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate

    touched = False
    """Whether the current update has changed any weight."""
    _reader: WeightReader | None = None
    _expected: ExpectedParameters | None = None
    _receiver: WeightReceiver | None = None
    _moves: list[TensorMove] | None = None
    _moves_planned = False
    """Whether `_moves` has been computed; the result may be None."""

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        self._reader, self._expected = open_reader(init_info.reader), init_info.expected

    def start_weight_update(self) -> None:
        """Does nothing: the model is changed only when the version has been opened."""

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Loads a version. Raises WeightsMismatch if the tensors are not this model's, before anything is changed, or
        if parameters of vLLM's model got no tensor."""
        if update_info.stream is not None:
            self._receive(update_info.stream, update_info.version)
            return
        assert self._reader is not None and self._expected is not None
        with self._reader(Path(update_info.folder), update_info.version) as tensors:
            self._expected.check(tensors)
            moves = self._direct(tensors)
            self.touched = True
            if moves is not None:
                apply_tensor_moves(moves, tensors)
            else:
                self._reload(iter(tensors.items()))
        pack_heads(self.model)

    def _receive(self, where: dict[str, Any], version: int) -> None:
        """Loads buckets as they arrive. Each bucket is checked before it is loaded; each worker loads its shard."""
        self._receiver = self._receiver or open_receiver(where)
        with contextlib.ExitStack() as stack:
            with unpinned_nccl_env():  # the trainer does not have vLLM's NCCL settings
                stream = self._receiver.stream(where, version, self.parallel_config.rank, self.device)
                coming = stack.enter_context(stream)
            first = next(coming)  # the model is not changed before the first tensor arrives
            self.touched = True
            self._reload(itertools.chain([first], coming))
        pack_heads(self.model)

    def _direct(self, tensors: Mapping[str, Tensor]) -> list[TensorMove] | None:
        """The moves that replace vLLM's reload, if that is possible."""
        if not self._moves_planned:
            alone = self.parallel_config.world_size == 1 and self.model_config.quantization is None
            like = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            same = all(dtype == self.model_config.dtype for _, dtype in like.values())
            shapes = {name: shape for name, (shape, _) in like.items()}
            self._moves = plan_tensor_moves(self.model, shapes) if alone and same else None
            self._moves_planned = True
        return self._moves

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        try:
            loaded = self.model.load_weights(tensors)
        finally:
            # Also after a failure: otherwise layers would count the tensors they have buffered as part of the next
            # version.
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None and wanted - set(loaded):
            raise WeightsMismatch((), sorted(wanted - set(loaded)))

    def finish_weight_update(self) -> None:
        """Does nothing: the version is loaded."""

    def shutdown(self) -> None:
        self._reader = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _picklable(error: Exception) -> Exception:
    """The error, or a picklable one with the same message."""
    try:
        copy.copy(error)
    except TypeError:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@torch.no_grad()
def pack_heads(model: nn.Module) -> None:
    """Packs the weights of output layers again on the CPU platform, where vLLM keeps a packed copy of them.

    If an output layer is tied to the embedding, vLLM's reload packs the weight for the embedding only, and the output
    layer would keep its old copy.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            layer.quant_method.process_weights_after_loading(layer)


WeightTransferEngineFactory.register_engine(BACKEND, LockstepTransferEngine)
