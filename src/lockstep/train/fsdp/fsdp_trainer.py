"""The FSDP2 trainer: one rank of a policy with its optimizer, and the frozen reference if a KL term needs one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.micro_batch import MicroBatch
from lockstep.models.lora import starts_from_other_weights
from lockstep.models.model_loader import context_length, resolve_dtype
from lockstep.models.packing_probe import PackingProbeResult, probe_packing
from lockstep.models.policy_model import PolicyModel
from lockstep.models.score_model import ScoreModel
from lockstep.models.vision.model_parts import ModelPart
from lockstep.train.adapters.adapter_training import (
    InitialAdapter,
    adapter_dropout,
    adapter_reference,
    base_digests,
    seed_dropout,
)
from lockstep.train.adapters.merged_weights import MergedWeights
from lockstep.train.checkpoints import checkpoint
from lockstep.train.checkpoints.checkpoint import PARAMETER, LocalRows
from lockstep.train.checkpoints.checkpoint_files import INHERITED, read_manifest
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.checkpoints.random_state import random_state, set_random_state
from lockstep.train.distributed import ParallelContext
from lockstep.train.forward.image_inputs import image_inputs
from lockstep.train.forward.kept_forward import KeptForward
from lockstep.train.forward.target_values import (
    ForwardSettings,
    add_reference,
    evaluate_each,
    split_outputs,
    target_values,
)
from lockstep.train.fsdp.moving_reference import mix_into_reference, reference_rows
from lockstep.train.fsdp.parallelize import (
    begin_microbatch,
    free_gathered,
    held_rows,
    load_sharded_policy,
    local_shard,
    move_weights,
    parameter_dtype,
    uncalled_modules,
)
from lockstep.train.lazy_weights import gather_buckets, own_shards
from lockstep.train.metric_reduction import MetricAccumulator, ReducedMetrics
from lockstep.train.model_export import export_adapter, export_model
from lockstep.train.objective import check_fields, make_objective
from lockstep.train.optimizer import (
    ShardedAdamW,
    clip_gradients,
    learning_rates,
    lr_metrics,
    norm_parameter_ids,
    square_norm,
)
from lockstep.train.router_objective import with_router_loss
from lockstep.train.trainer_protocol import (
    BucketWeights,
    GatheredRows,
    ParameterInfo,
    ParameterShard,
    StepStats,
)
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder import recorder

_REFERENCE = "reference."
"""Prefix of the weights of a reference that moves."""


class FSDP2Trainer:
    """One rank of a trainer (`lockstep.train.trainer_protocol.Trainer`).

    The model's dropout is off, because the ratio of two probabilities under different dropout masks is noise. The
    adapter's dropout is on during steps.

    Args:
        role: the model, its trainer and its objective.
        ranks: returned by `lockstep.train.distributed.join_ranks`.
        generation: generation of the run, part of the temporary names of checkpoints.
        images: the folder of the run's prepared images; None if the data has none.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
    """

    def __init__(
        self, role: TrainRole, ranks: ParallelContext, generation: int = 1, images: Path | None = None
    ) -> None:
        self.role, self.ranks = role, ranks
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        self.adapter = role.model.adapter
        kept = parameter_dtype(role.model, ranks, self.compute_dtype)
        self.policy = load_sharded_policy(
            role.model, ranks, self.compute_dtype, kept, self.adapter, role.trainer, role.seed
        )
        self.objective = with_router_loss(make_objective(role.objective), self.policy, role)
        # Created while no layer is gathered, because a gathered layer holds plain parameters instead of its shards.
        self.merged_weights = MergedWeights(self.policy, ranks, partial(held_rows, ranks))
        self.has_reference, self.mixing = role.holds_reference, role.objective.reference_mixing
        self.reference: PolicyModel | None = None
        """The reference as a separate model. With an adapter it is None: the policy without the adapter, or with the
        adapter's initial values, is the reference."""
        if self.has_reference and self.adapter is None:
            self.reference = load_sharded_policy(
                role.model, ranks, self.compute_dtype, self.compute_dtype, trainer=role.trainer
            ).requires_grad_(False)
        other_weights = self.adapter is not None and starts_from_other_weights(self.policy, self.adapter)
        self.initial_adapter = InitialAdapter(self._rows()) if self.has_reference and other_weights else None
        norms = norm_parameter_ids(self.policy)
        undecayed = [name for name, parameter in self.trained_parameters.items() if id(parameter) in norms]
        parts = self.merged_weights.trained_parts
        self.optimizer = ShardedAdamW(self._rows(), role.trainer.optimizer, parts, undecayed)
        self.writer = checkpoint.CheckpointWriter(ranks, generation)
        self.base_digests = base_digests(role.model)
        """Digests of the model on which the adapter is trained, for its checkpoints."""
        self.steps_before_run = 0
        """Optimizer steps of another run, from whose checkpoint this run started."""
        self.offloaded = False
        self.kept = KeptForward.of(role, self.objective)
        self.uncalled = uncalled_modules(self.policy) if images is None else []
        inputs = image_inputs(images, role.model, self.policy, ranks.device)
        self.forward = ForwardSettings(ranks.device, role.temperature, role.trainer.head_chunk, inputs)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """With an adapter, its parameters and the weights that are trained with it, by their names in peft's files;
        else all weights that are not frozen."""
        return self.merged_weights.trained

    @property
    def has_new_head(self) -> bool:
        """Whether the model has a score head that its checkpoint lacks."""
        return isinstance(self.policy, ScoreModel) and self.policy.has_new_head

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""
        return context_length(self.policy.config)

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps taken, also those before a loaded checkpoint."""
        return self.optimizer.steps

    def parameters(self) -> list[ParameterInfo]:
        """Returns every weight that engines receive."""
        weights = self.merged_weights
        return [
            ParameterInfo(name, weights.shape(name), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in weights.published.items()
        ]

    def probe_packing(self) -> PackingProbeResult:
        """Finds out how rows may be packed for the model. All ranks call it."""
        result = probe_packing(self.policy, self.compute_dtype, self.forward.probe_image())
        free_gathered(self.policy)
        return result

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the requested values of each micro-batch, float32 `[targets]`. If they are those that the objective
        learns from, the next `step` on the same rows continues the first forward passes (`kept_microbatches`).

        Raises:
            ValueError: reference log-probabilities are requested and no reference is loaded.
        """
        self._check_on_device()
        policy_outputs = split_outputs(outputs, self.has_reference)
        results: list[dict[str, np.ndarray]] = [{} for _ in microbatches]
        if policy_outputs:
            self.kept.clear()
            kept = self.kept if tuple(policy_outputs) == self.objective.outputs else None
            results = evaluate_each(self.policy, microbatches, policy_outputs, self.forward, kept)
        if "reference_logprobs" in outputs:
            with self._as_reference() as reference:
                add_reference(results, reference, microbatches, self.forward)
        for model in self._models():
            free_gathered(model)
        return results

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> StepStats:
        """Takes one optimizer step on the sum of the losses of all targets of all ranks.

        Raises:
            ValueError: there are no micro-batches, or a field that the loss needs is missing; raised before any
                collective.
            NonFinite: the loss or a gradient is not finite; raised on all ranks, before any weight is changed.
            CollectiveStalled: the node agent has aborted this rank's collectives.
        """
        self._check_on_device()
        check_fields(microbatches, self.objective)
        self.kept.match(microbatches)
        metrics = MetricAccumulator(self.objective.metrics, self.ranks.device)
        with adapter_dropout(self.policy, self.adapter):
            for done, microbatch in enumerate(microbatches, start=1):
                last, reshard = done == len(microbatches), self.role.trainer.reshard_after_forward
                begin_microbatch(self.policy, last, reshard, self.uncalled)
                seed_dropout(self.adapter, self.role.seed, self.optimizer.steps, done, self.ranks.rank)
                self._backward(microbatch, metrics)
                current_beacon().finish_unit("microbatches", done, len(microbatches))
        gradients = {name: local_shard(p.grad) for name, p in self.trained_parameters.items() if p.grad is not None}
        # All replicas have the same gradient; only one of them adds it to the norm.
        squares = square_norm(gradients if self.ranks.replica == 0 else {})
        vectors = self.ranks.gather(
            metrics.vector(squares), why=f"metrics of optimizer step {self.optimizer.steps + 1}"
        )
        totals = ReducedMetrics(self.objective.metrics, vectors)
        try:
            totals.check_finite(self.optimizer.steps + 1)
            norm = totals.square_norm**0.5
            rates = self.learning_rates()
            clip_gradients(gradients, norm, self.role.trainer.max_grad_norm)
            # An aborted NCCL collective ends without an error, but its result must not be used.
            recorder.raise_if_stalled()
            self.optimizer.step(self._rows(), gradients, rates)
        finally:
            for parameter in self.trained_parameters.values():
                parameter.grad = None
        done = self.optimizer.steps - self.steps_before_run
        if self.mixing is not None and self.reference is not None and done % self.mixing.steps == 0:
            mix_into_reference(self.reference, self.policy, self.mixing.share)
        current_beacon().finish_unit("optimizer steps", done, self.role.optimizer_steps)
        values = {**totals.values, "grad_norm": norm, **lr_metrics(rates, self.role.model)}
        return StepStats(values, totals.loads if self.ranks.rank == 0 else [])

    def learning_rates(self) -> dict[ModelPart, float]:
        """Returns the learning rate of each part of the model in the next optimizer step."""
        role, step = self.role, self.optimizer.steps - self.steps_before_run
        return learning_rates(step, role.model, role.trainer, role.optimizer_steps)

    def shards(self) -> Iterator[ParameterShard]:
        """Yields this rank's rows of every published weight, merged with the adapter, for weight sync. All ranks call
        it."""
        yield from own_shards(self.merged_weights.merged(published=True), self.ranks)

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Yields every published weight, merged with the adapter, bucket by bucket; see `gather_buckets`."""
        return gather_buckets(self.merged_weights.merged(published=True), buckets, self.ranks, everyone)

    def save(self, folder: Path) -> None:
        """Begins to write trained parameters, optimizer, schedule step and random state; see `CheckpointWriter`."""
        metadata = {**self._counts(), "model": self.role.model.path, **self.base_digests}
        self.writer.save(folder, self._state(), random_state(self.ranks), metadata)

    def saved(self) -> bool:
        """Returns whether the last `save` is complete on disk. Raises CheckpointError if it failed."""
        return self.writer.saved()

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote. From one that another run wrote, the first that a new run
        loads, it takes what the checkpoint says: the weights, and the optimizer's state or a fresh one.

        Raises:
            CheckpointError: the checkpoint is incomplete or belongs to another model; nothing was changed.
        """
        self._begin_load()
        state, random = self._state(), random_state(self.ranks)
        inherited = read_manifest(folder).get(INHERITED)
        if inherited is not None:
            random = {}
            state = {name: rows for name, rows in state.items() if not name.startswith(_REFERENCE)}
        if inherited == "weights":
            state = {name: rows for name, rows in state.items() if name.startswith(PARAMETER)}
        manifest = checkpoint.load_checkpoint(folder, state, random, self.ranks, self.base_digests)
        if inherited == "weights":
            self.optimizer.reset()
            self.steps_before_run = 0
            return
        self._set_counts(manifest)
        if inherited == "all":
            self.steps_before_run = self.optimizer.steps
        else:
            set_random_state(random, self.ranks)

    def _counts(self) -> dict[str, int]:
        before = {"steps_before_run": self.steps_before_run} if self.steps_before_run else {}
        return {"optimizer_step": self.optimizer.steps, **before}

    def _set_counts(self, values: Mapping[str, Any]) -> None:
        self.optimizer.steps = int(values["optimizer_step"])
        self.steps_before_run = int(values.get("steps_before_run", 0))

    def save_to_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        """Copies the content of a checkpoint into shared memory. Raises SharedMemoryFull."""
        checkpoints.write(version, self._full_state(), self._counts())

    def load_from_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        """Loads a memory checkpoint that the same number of ranks wrote. Raises MemoryCheckpointMissing."""
        self._begin_load()
        state = self._full_state()
        with torch.no_grad():
            metadata = checkpoints.read(version, state)
        self._set_counts(metadata)
        set_random_state(state, self.ranks)

    def _full_state(self) -> dict[str, Tensor]:
        return {name: rows.local for name, rows in self._state().items()} | random_state(self.ranks)

    def export(self, folder: Path, added: Mapping[str, Any] = MappingProxyType({})) -> None:
        """See `Trainer`; in the compute precision. Rank 0 gathers one parameter at a time; the other ranks hold only
        their own rows."""
        described = self.role.model, self.compute_dtype, self.ranks, added
        export_model(folder, self.policy, self.merged_weights.merged(), *described)

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. All ranks call it."""
        if self.adapter is None:
            raise ValueError("there is no adapter to export; set model.adapter")
        parts = self.merged_weights.gather_adapter() | self.merged_weights.gather_saved()
        export_adapter(folder, self.policy, parts, self.role.model, self.ranks)

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory, so that an engine can use the device's memory.
        While offloaded, weights can be published and checkpoints written."""
        self._move(torch.device("cpu"), parameters, optimizer)
        self.offloaded = parameters or optimizer

    def onload(self) -> None:
        """Moves parameters and optimizer state back to the device."""
        self._move(self.ranks.device, True, True)
        self.offloaded = False

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
        try:
            self.writer.finish()
        finally:
            self.ranks.leave()

    def _as_reference(self) -> AbstractContextManager[PolicyModel]:
        """Yields the reference: a separate model, or the policy as it is without what was trained."""
        if self.reference is not None:
            return nullcontext(self.reference)
        return adapter_reference(self.policy, self.initial_adapter, self._rows, partial(free_gathered, self.policy))

    def _backward(self, microbatch: MicroBatch[np.ndarray], metrics: MetricAccumulator) -> None:
        batch, outputs = microbatch.to(self.ranks.device), self.kept.pop()
        if outputs is None:
            outputs = target_values(self.policy, batch, self.objective.outputs, self.forward)
        outcome = self.objective.compute(batch.fields, outputs, batch.sequences)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        metrics.add(outcome)

    def _rows(self) -> dict[str, Tensor]:
        return {name: local_shard(parameter) for name, parameter in self.trained_parameters.items()}

    def _state(self) -> dict[str, LocalRows]:
        """Returns everything that is sharded by rows, by its name in checkpoints."""
        state = {}
        for name, parameter in self.trained_parameters.items():
            shape = tuple(parameter.shape)
            state[f"{PARAMETER}{name}"] = LocalRows(local_shard(parameter), shape)
            state[f"exp_avg.{name}"] = LocalRows(self.optimizer.exp_avg[name], shape)
            state[f"exp_avg_sq.{name}"] = LocalRows(self.optimizer.exp_avg_sq[name], shape)
        if self.reference is not None and self.mixing is not None:
            state |= {f"{_REFERENCE}{name}": rows for name, rows in reference_rows(self.reference, self.policy).items()}
        return state

    def _models(self) -> list[PolicyModel]:
        return [self.policy] if self.reference is None else [self.policy, self.reference]

    def _begin_load(self) -> None:
        self._check_on_device()
        self.kept.clear()
        for model in self._models():
            free_gathered(model)

    def _move(self, device: torch.device, parameters: bool, optimizer: bool) -> None:
        self.kept.clear()
        for model in self._models() if parameters else []:
            move_weights(model, device, self.ranks.device)
        self.merged_weights = MergedWeights(self.policy, self.ranks, partial(held_rows, self.ranks))
        if optimizer:
            self.optimizer.to(device)
        if device.type == "cpu" and self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # so that an engine on this device can use the memory

    def _check_on_device(self) -> None:
        if self.offloaded:
            raise RuntimeError("the trainer is offloaded to host memory; call onload() first")
