"""Loads weights into a worker of vLLM through vLLM's weight-transfer interface.

Importing this module registers the backend. vLLM imports it in each of its workers, because `WorkerExtension` is their
extension class. So with tensor parallelism each worker reads the shared memory itself and loads its own shard.

On a CPU, weights of some models are loaded directly, without vLLM's layerwise reload, which makes every layer anew:
that costs a copy of all weights and, for small models, far more time in Python. Direct loading packs each layer
straight from the store's memory. Equal names and shapes do not make that safe: some models rearrange what they load,
and some compute logits with the embedding. So it is only used for `DIRECT_MODELS`, without quantization, and with one
worker.
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
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from lockstep.models.vision.model_parts import MODEL_PARTS, ModelPart
from lockstep.rollout.errors import WeightsMismatch
from lockstep.rollout.vllm.layer_reload import (
    DirectWrites,
    accept_bare_tower_names,
    copy_biases,
    drop_expert_kernels,
    pack_heads,
)
from lockstep.rollout.weight_loading import (
    CheckpointParameters,
    ReaderSource,
    WeightReader,
    WeightReceiver,
    join_contiguous,
    open_reader,
    open_receiver,
    publish_worker_progress,
)

try:
    from vllm.utils.nccl import unpinned_nccl_env
except ImportError:  # an older vLLM, which does not change NCCL's environment
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
    """Whether weights of the worker may have changed."""
    error: Exception | None = None


class WorkerExtension:
    """The extension class of vLLM's workers, which makes them import this module."""

    weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def take_weights(self, info: dict[str, Any], progress_file: str = "") -> UpdateResult:
        """Loads a version and writes the progress to `progress_file`.

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
    """Arguments that are set once: the reader of the store, and the parameters that a version must have."""

    reader: ReaderSource
    expected: CheckpointParameters


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Arguments of an update: the version, and the folder of the store or the description of a stream."""

    version: int
    folder: str = ""
    stream: dict[str, Any] | None = None


_MODELS = "vllm.model_executor.models."
DIRECT_MODELS = frozenset(
    _MODELS + name
    for name in (
        "llama.LlamaForCausalLM",
        "mistral.MistralForCausalLM",
        "qwen2.Qwen2ForCausalLM",
        "qwen3.Qwen3ForCausalLM",
    )
)
"""vLLM's models whose `load_weights` does nothing but concatenate tensors as `packed_modules_mapping` says, and whose
output layer is a `ParallelLMHead`. A test compares each with a freshly loaded engine."""


@dataclass(frozen=True, slots=True)
class TensorMove:
    """How to load a parameter of a layer: by concatenating tensors of the store."""

    layer: Any
    name: str
    sources: tuple[str, ...]
    packed: bool
    """Whether vLLM keeps only a packed form of the parameter."""


def plan_tensor_moves(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorMove] | None:
    """Returns how to load each parameter of the model; None if direct loading cannot be used for the whole model."""
    if f"{type(model).__module__}.{type(model).__qualname__}" not in DIRECT_MODELS:
        return None
    if not current_platform.is_cpu() or getattr(current_platform, "is_zen_cpu", lambda: False)():
        return None
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    moves: list[TensorMove] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        if hasattr(layer, "process_weights_after_loading") and type(layer).__name__ != "Attention":
            return None
        for name, parameter in layer._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            move = _plan_move(layer, name, parameter, _checkpoint_names(path, name, fused), shapes)
            if move is None:
                return None
            moves.append(move)
    used = [source for move in moves for source in move.sources]
    return moves if sorted(used) == sorted(shapes) else None


@torch.no_grad()
def apply_tensor_moves(moves: list[TensorMove], tensors: Mapping[str, Tensor]) -> None:
    """Loads all parameters. `pack_heads` must follow. Does not refer to the tensors' memory afterwards."""
    for move in moves:
        pieces = [tensors[name] for name in move.sources]
        if move.packed:
            _pack_weights(move, pieces)
        else:
            _copy_weights(move, pieces)


def _checkpoint_names(path: str, name: str, fused: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The names in a checkpoint of the tensors that make up a parameter of the layer at `path`."""
    parent, _, module = path.rpartition(".")
    parts = fused.get(module, [module])
    return tuple(".".join(filter(None, (parent, part, name))) for part in parts)


def _plan_move(
    layer: nn.Module, name: str, parameter: Tensor, sources: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> TensorMove | None:
    """Returns how to load a parameter; None if that is not known, or if the shapes do not fit."""
    packed = parameter.numel() == 0
    unpacked = get_layerwise_info(layer).restore_metadata[0].get(name) if packed else parameter
    if unpacked is None or any(source not in shapes for source in sources):
        return None
    shape, source_shapes = tuple(unpacked.shape), [shapes[source] for source in sources]
    rows = sum(each[0] for each in source_shapes)
    padded = isinstance(layer, VocabParallelEmbedding) and rows <= shape[0]
    if any(each[1:] != shape[1:] for each in source_shapes) or not (rows == shape[0] or padded):
        return None
    if isinstance(layer, LinearBase):
        supported = type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod
    else:
        supported = not packed and (isinstance(layer, VocabParallelEmbedding) or len(sources) == 1)
    return TensorMove(layer, name, sources, packed) if supported else None


def _pack_weights(move: TensorMove, pieces: list[Tensor]) -> None:
    joined = join_contiguous(pieces)
    setattr(move.layer, move.name, nn.Parameter(joined, requires_grad=False))
    move.layer.quant_method.process_weights_after_loading(move.layer)
    parameter = getattr(move.layer, move.name)
    if parameter.numel():  # it was not packed: it must not refer to the store's memory, which is written again
        setattr(move.layer, move.name, nn.Parameter(parameter.clone(), requires_grad=False))


def _copy_weights(move: TensorMove, pieces: list[Tensor]) -> None:
    parameter, start = move.layer._parameters[move.name], 0
    for piece in pieces:
        parameter.data[start : start + len(piece)].copy_(piece)
        start += len(piece)
    if isinstance(move.layer, LinearBase) and move.name == "weight":
        move.layer.quant_method.process_weights_after_loading(move.layer)


class LockstepTransferEngine(WeightTransferEngine[StoreInit, StoreUpdate]):  # type: ignore[misc]
    """vLLM's weight-transfer engine for Lockstep's shared-memory store and streams. It loads a version in one call."""

    init_info_cls = StoreInit
    update_info_cls = StoreUpdate

    touched = False
    """Whether the current update has changed any weight."""
    _reader: WeightReader | None = None
    _expected: CheckpointParameters | None = None
    _receiver: WeightReceiver | None = None
    _moves: list[TensorMove] | None = None
    _moves_planned = False
    """Whether `_moves` has been computed; the result may be None."""

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        self._reader, self._expected = open_reader(init_info.reader), init_info.expected

    def start_weight_update(self) -> None:
        """Does nothing: the update begins when the version has been opened."""

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Loads a version.

        Raises:
            WeightsMismatch: the tensors do not fit the model, and nothing was changed; or parameters of vLLM's model
                got no tensor.
        """
        if update_info.stream is not None:
            self._load_stream(update_info.stream, update_info.version)
            return
        assert self._reader is not None and self._expected is not None
        with self._reader(Path(update_info.folder), update_info.version) as tensors:
            self._expected.check(tensors)
            moves = self._plan_direct_loading(tensors)
            self.touched = True
            if moves is not None:
                apply_tensor_moves(moves, tensors)
            else:
                self._reload(iter(tensors.items()))
        pack_heads(self.model)

    def _load_stream(self, where: dict[str, Any], version: int) -> None:
        """Loads buckets as they arrive. Each bucket is verified before it is loaded."""
        self._receiver = self._receiver or open_receiver(where)
        with contextlib.ExitStack() as stack:
            with unpinned_nccl_env():  # the trainer does not have vLLM's NCCL settings
                stream = self._receiver.stream(where, version, self.parallel_config.rank, self.device)
                arriving = stack.enter_context(stream)
            first = next(arriving)  # the model is not changed before the first tensor arrives
            self.touched = True
            self._reload(itertools.chain([first], arriving))
        pack_heads(self.model)

    def _plan_direct_loading(self, tensors: Mapping[str, Tensor]) -> list[TensorMove] | None:
        """Returns how to load each parameter without vLLM's reload; None if that is not possible."""
        if not self._moves_planned:
            plain = self.parallel_config.world_size == 1 and self.model_config.quantization is None
            kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            same_dtype = all(dtype == self.model_config.dtype for _, dtype in kinds.values())
            shapes = {name: shape for name, (shape, _) in kinds.items()}
            self._moves = plan_tensor_moves(self.model, shapes) if plain and same_dtype else None
            self._moves_planned = True
        return self._moves

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Loads the weights by vLLM's layerwise reload, under the names that checkpoints have."""
        assert self._expected is not None
        expected = {name for name, _ in self.model.named_parameters()}
        drop_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        # Now the model no longer has the parameters that layers derive from others after loading.
        expected &= {name for name, _ in self.model.named_parameters()}
        expected = {name for name in expected if name.rpartition(".")[2] not in self._expected.buffers}
        arrived: set[str] = set()
        try:
            with DirectWrites(self.model) as writes:
                noted = _note_names(tensors, arrived)
                loaded = self.model.load_weights(copy_biases(self._expected.checkpoint_tensors(noted)))
            writes.finish()
        finally:
            # Also after a failure: otherwise layers would count the tensors they have buffered as part of the next
            # version.
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and self.model_config.quantization is None:
            kept = names_of_parts(self.model, expected, set(MODEL_PARTS) - self._expected.parts(arrived))
            if missing := expected - set(loaded) - kept:
                raise WeightsMismatch((), sorted(missing))

    def finish_weight_update(self) -> None:
        """Does nothing: the version is loaded."""

    def shutdown(self) -> None:
        self._reader = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _note_names(tensors: Iterator[tuple[str, Tensor]], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors and adds their names to `names`."""
    for name, tensor in tensors:
        names.add(name)
        yield name, tensor


def names_of_parts(model: Any, names: set[str], parts: set[ModelPart]) -> set[str]:
    """Returns which of vLLM's parameters belong to these parts of the model. If vLLM does not say where its parts are,
    all do, because none can be judged."""
    if not parts or not hasattr(model, "embed_multimodal"):
        return set()
    if not hasattr(model, "get_mm_mapping"):
        return names
    mapping = model.get_mm_mapping()
    prefixes = tuple(mapping.connector or ()), tuple(mapping.tower_model or ())

    def part(name: str) -> ModelPart:  # the projector may be within the tower
        return "projector" if name.startswith(prefixes[0]) else "tower" if name.startswith(prefixes[1]) else "language"

    return {name for name in names if part(name) in parts}


def _picklable(error: Exception) -> Exception:
    """Returns the error, or one with the same message that can be pickled."""
    try:
        copy.copy(error)
    except TypeError:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


WeightTransferEngineFactory.register_engine(BACKEND, LockstepTransferEngine)
accept_bare_tower_names()
