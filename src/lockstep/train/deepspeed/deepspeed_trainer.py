"""The DeepSpeed trainer: one rank of a policy with its optimizer, and the frozen reference if a KL term needs one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

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
from lockstep.train.checkpoints.checkpoint import PARAMETER, CheckpointWriter, read_checkpoint
from lockstep.train.checkpoints.checkpoint_files import INHERITED, read_manifest
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.checkpoints.random_state import random_state, set_random_state
from lockstep.train.deepspeed.deepspeed_library import make_engine
from lockstep.train.deepspeed.engine_settings import KIND, OffloadPlace, engine_settings, offloads, zero_stage
from lockstep.train.deepspeed.held_rows import held_rows
from lockstep.train.deepspeed.master_weights import gather_pieces
from lockstep.train.deepspeed.zero_model import Reference, fill_model, make_model, register_parameters
from lockstep.train.deepspeed.zero_state import full_shape, make_state, reset_moments, set_step
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError, MemoryCheckpointMissing, TrainerUnsupported
from lockstep.train.forward.image_inputs import image_inputs
from lockstep.train.forward.target_values import (
    ForwardSettings,
    add_reference,
    evaluate_each,
    split_outputs,
    target_values,
)
from lockstep.train.lazy_weights import gather_buckets, own_shards
from lockstep.train.metric_reduction import MetricAccumulator, ReducedMetrics
from lockstep.train.model_export import export_adapter, export_model
from lockstep.train.objective import check_fields, make_objective
from lockstep.train.optimizer import learning_rates, lr_metrics, optimizer_groups, square_norm
from lockstep.train.router_objective import with_router_loss
from lockstep.train.trainer_protocol import BucketWeights, GatheredRows, ParameterInfo, ParameterShard, StepStats
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder import recorder


class DeepSpeedTrainer:
    """One rank of a trainer (`lockstep.train.trainer_protocol.Trainer`).

    DeepSpeed divides gradients by the number of ranks, and nothing else: its accumulation is 1, and the trainer says
    which micro-batch is the last of a step. Losses are multiplied by the number of ranks, so that gradients are sums.

    Args:
        role: the model, its trainer and its objective.
        ranks: returned by `lockstep.train.distributed.join_ranks`.
        generation: generation of the run, part of the temporary names of checkpoints.
        images: the folder of the run's prepared images; None if the data has none.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
        TrainerUnsupported: the settings contradict the run's config, or are not supported.
    """

    def __init__(
        self, role: TrainRole, ranks: ParallelContext, generation: int = 1, images: Path | None = None
    ) -> None:
        self.role, self.ranks, self.stage = role, ranks, zero_stage(role)
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        self.copies = ranks if self.stage == 3 else replace(ranks, replicas=ranks.world)
        """The ranks as holders of the model's parameters: below stage 3, each holds a copy."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        self.adapter = role.model.adapter
        self.policy = make_model(role, ranks)
        elements = sum(each.numel() for each in self._merged_weights().trained.values())
        hidden = int(self.policy.config.get_text_config().hidden_size)
        settings = engine_settings(role, dtype, hidden, elements, ranks.device.type)
        fill_model(self.policy, role, ranks, settings, role.seed)
        self.merged_weights = self._merged_weights()
        self.objective = with_router_loss(make_objective(role.objective), self.policy, role)
        self.optimizer = self._make_optimizer(images is not None)
        self.engine = make_engine(ranks, self.policy, settings, self.optimizer)
        if self.stage == 3:
            register_parameters(self.policy)
        self.state = make_state(self.engine, self.stage, self.merged_weights.trained, ranks.rank == 0)
        inputs = image_inputs(images, role.model, self.policy, ranks.device)
        self.forward = ForwardSettings(ranks.device, role.temperature, role.trainer.head_chunk, inputs)
        self.has_reference = role.holds_reference
        self.reference = Reference(role, ranks, settings) if self.has_reference and self.adapter is None else None
        """The reference as a separate model. With an adapter it is None: the policy without the adapter, or with the
        adapter's initial values, is the reference."""
        other_weights = self.adapter is not None and starts_from_other_weights(self.policy, self.adapter)
        self.initial_adapter = InitialAdapter(self._master_weights()) if self.has_reference and other_weights else None
        self.base_digests = base_digests(role.model)
        """Digests of the model on which the adapter is trained, for its checkpoints."""
        self.optimizer_step = 0
        """Number of optimizer steps taken, also those before a loaded checkpoint."""
        self.steps_before_run = 0
        """Optimizer steps of another run, from whose checkpoint this run started."""
        self.writer = CheckpointWriter(ranks if self.stage else self.copies, generation)

    def _merged_weights(self) -> MergedWeights:
        return MergedWeights(self.policy, self.copies, partial(held_rows, self.copies))

    @property
    def has_new_head(self) -> bool:
        """Whether the model has a score head that its checkpoint lacks."""
        return isinstance(self.policy, ScoreModel) and self.policy.has_new_head

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""
        return context_length(self.policy.config)

    def parameters(self) -> list[ParameterInfo]:
        """Returns every weight that engines receive, in the precision of the model's parameters."""
        return [
            ParameterInfo(name, tuple(full_shape(each)), str(each.dtype).removeprefix("torch."))
            for name, each in self.merged_weights.published.items()
        ]

    def probe_packing(self) -> PackingProbeResult:
        """Finds out how rows may be packed for the model. All ranks call it."""
        return probe_packing(self.policy, self.compute_dtype, self.forward.probe_image())

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the requested values of each micro-batch, float32 `[targets]`.

        Raises:
            ValueError: reference log-probabilities are requested and no reference is loaded.
        """
        policy_outputs = split_outputs(outputs, self.has_reference)
        results: list[dict[str, np.ndarray]] = [{} for _ in microbatches]
        if policy_outputs:
            results = evaluate_each(self.policy, microbatches, policy_outputs, self.forward)
        if "reference_logprobs" in outputs:
            with self._as_reference() as reference:
                add_reference(results, reference, microbatches, self.forward)
        return results

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> StepStats:
        """Takes one optimizer step on the sum of the losses of all targets of all ranks.

        Raises:
            ValueError: there are no micro-batches, or a field that the loss needs is missing; raised before any
                collective.
            NonFinite: the loss or a gradient is not finite; raised on all ranks, before any weight is changed.
            CollectiveStalled: the node agent has aborted this rank's collectives.
        """
        check_fields(microbatches, self.objective)
        metrics = MetricAccumulator(self.objective.metrics, self.ranks.device)
        with adapter_dropout(self.policy, self.adapter):
            for done, microbatch in enumerate(microbatches, start=1):
                self.engine.set_gradient_accumulation_boundary(done == len(microbatches))
                seed_dropout(self.adapter, self.role.seed, self.optimizer_step, done, self.ranks.rank)
                self._backward(microbatch, metrics)
                current_beacon().finish_unit("microbatches", done, len(microbatches))
        step = self.optimizer_step + 1
        vector = metrics.vector(square_norm(self.state.gradients()))
        totals = ReducedMetrics(
            self.objective.metrics, self.ranks.gather(vector, why=f"metrics of optimizer step {step}")
        )
        try:
            totals.check_finite(step)
            recorder.raise_if_stalled()
        except (ArithmeticError, RuntimeError):
            self.state.discard_gradients()
            raise
        rates = self.learning_rates()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rates[group["part"]]
        self.engine.step()
        recorder.raise_if_stalled()
        self.optimizer_step = step
        done = step - self.steps_before_run
        current_beacon().finish_unit("optimizer steps", done, self.role.optimizer_steps)
        norm = totals.square_norm**0.5
        values = {**totals.values, "grad_norm": norm, **lr_metrics(rates, self.role.model)}
        return StepStats(values, totals.loads if self.ranks.rank == 0 else [])

    def learning_rates(self) -> dict[ModelPart, float]:
        """Returns the learning rate of each part of the model in the next optimizer step."""
        role, step = self.role, self.optimizer_step - self.steps_before_run
        return learning_rates(step, role.model, role.trainer, role.optimizer_steps)

    def shards(self) -> Iterator[ParameterShard]:
        """Yields the rows of every weight that this rank publishes, merged with the adapter. All ranks call it."""
        yield from own_shards(self.merged_weights.merged(published=True), self.copies)

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Yields every published weight, merged with the adapter, bucket by bucket; see `gather_buckets`."""
        return gather_buckets(self.merged_weights.merged(published=True), buckets, self.copies, everyone)

    def save(self, folder: Path) -> None:
        """Begins to write trained parameters, optimizer, schedule step and random state; see `CheckpointWriter`."""
        metadata = {**self._counts(), "model": self.role.model.path, **self.base_digests}
        self.writer.save(folder, self.state.state(), random_state(self.ranks), metadata)

    def saved(self) -> bool:
        """Returns whether the last `save` is complete on disk. Raises CheckpointError if it failed."""
        return self.writer.saved()

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote, also one of the FSDP2 trainer; see `FSDP2Trainer.load`.

        Raises:
            CheckpointError: the checkpoint is incomplete or belongs to another model; nothing was changed.
        """
        state, random = self.state.state(), random_state(self.ranks)
        problem: CheckpointError | None = None
        found, inherited = None, None
        try:
            inherited = read_manifest(folder).get(INHERITED)
            if inherited == "weights":
                state = {name: rows for name, rows in state.items() if name.startswith(PARAMETER)}
            whole = random if inherited is None else {}
            found = read_checkpoint(folder, state, whole, self.writer.ranks, self.base_digests)
        except CheckpointError as error:
            problem = error
        failed = self._first_failed(problem, f"{folder.name} is read")
        if found is None or failed is not None:
            raise CheckpointError(folder, f"rank {failed} could not read its part; see its log")
        found.fill()
        self._set_weights()
        if inherited == "weights":
            reset_moments(self.optimizer)
            self.optimizer_step = self.steps_before_run = 0
            return
        self._set_counts(found.manifest)
        if inherited == "all":
            self.steps_before_run = self.optimizer_step
        else:
            set_random_state(random, self.ranks)

    def save_to_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        """Copies the content of a checkpoint into shared memory. Raises SharedMemoryFull."""
        checkpoints.write(version, self._full_state(), self._counts())

    def load_from_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        """Loads a memory checkpoint that the same number of ranks wrote.

        Raises MemoryCheckpointMissing on all ranks if one of them lacks it; the master weights of the others are then
        those of the checkpoint, and the model's are not.
        """
        state = self._full_state()
        problem: MemoryCheckpointMissing | None = None
        counts: dict[str, Any] = {}
        try:
            with torch.no_grad():
                counts = checkpoints.read(version, state)
        except MemoryCheckpointMissing as error:
            problem = error
        failed = self._first_failed(problem, f"memory checkpoint {version} is read")
        if failed is not None:
            raise MemoryCheckpointMissing(checkpoints.folder, failed, version, "that rank could not read it")
        self._set_weights()
        self._set_counts(counts)
        set_random_state(state, self.ranks)

    def export(self, folder: Path, added: Mapping[str, Any] = MappingProxyType({})) -> None:
        """See `Trainer`; in the compute precision."""
        described = self.role.model, self.compute_dtype, self.copies, added
        export_model(folder, self.policy, self.merged_weights.merged(), *described)

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads: the master weights. All ranks call it."""
        if self.adapter is None:
            raise ValueError("there is no adapter to export; set model.adapter")
        pieces = {name: rows for name, rows in self.state.state().items() if name.startswith(PARAMETER)}
        whole = {name.removeprefix(PARAMETER): each for name, each in gather_pieces(self.ranks, pieces).items()}
        parts = {
            alias: each.clone() for name, each in whole.items() for alias in self.merged_weights.exported_names(name)
        }
        export_adapter(folder, self.policy, parts, self.role.model, self.copies)

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Frees the device's memory that the library keeps unused. `trainer.offload` has DeepSpeed keep parameters and
        optimizer state in host memory all the time (`offload_param`, `offload_optimizer`), so nothing has to move.

        Raises TrainerUnsupported for state that the role's settings do not keep there."""
        wanted: dict[OffloadPlace, bool] = {"offload_param": parameters, "offload_optimizer": optimizer}
        for place, asked in wanted.items():
            if asked and not offloads(self.role, place):
                field = self.role.field("trainer.offload")
                raise TrainerUnsupported(KIND, f"{field} after the start", f"set {field} before the run starts")
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Does nothing: DeepSpeed brings what it needs to the device."""

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
        try:
            self.writer.finish()
        finally:
            self.engine.destroy()
            if self.reference is not None:
                self.reference.close()
            self.ranks.leave()

    def _make_optimizer(self, sees: bool) -> torch.optim.AdamW:
        """AdamW of torch, which needs no compiler, with the groups of the FSDP2 trainer.

        Args:
            sees: whether the data has images. Without, tower and projector stay as they are: DeepSpeed gives weights
                that are in no forward a gradient of zero, and weight decay would shrink them.
        """
        settings, weights = self.role.trainer.optimizer, self.merged_weights
        groups = optimizer_groups(self.policy, weights.trained, weights.trained_parts, settings.weight_decay)
        for group in groups:
            if not sees and group["part"] != "language":
                group["weight_decay"] = 0.0
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def _as_reference(self) -> AbstractContextManager[PolicyModel]:
        """Yields the reference: a separate model, or the policy as it is without what was trained."""
        if self.reference is not None:
            return nullcontext(self.reference.policy)
        return adapter_reference(self.policy, self.initial_adapter, self._master_weights, self._set_weights)

    def _master_weights(self) -> dict[str, torch.Tensor]:
        """This rank's part of the trained weights, by name in checkpoints."""
        return {name: rows.local for name, rows in self.state.state().items() if name.startswith(PARAMETER)}

    def _backward(self, microbatch: MicroBatch[np.ndarray], metrics: MetricAccumulator) -> None:
        batch = microbatch.to(self.ranks.device)
        outputs = target_values(self.policy, batch, self.objective.outputs, self.forward, call=self.engine)
        outcome = self.objective.compute(batch.fields, outputs, batch.sequences)
        self.engine.backward(outcome.loss * self.ranks.world, scale_wrt_gas=False)
        metrics.add(outcome)

    def _first_failed(self, problem: Exception | None, why: str) -> int | None:
        """Raises this rank's problem, if there is one; else returns the first rank with one. All ranks call it."""
        failed = torch.tensor([float(problem is not None)])
        flags = self.ranks.gather(failed, why)[:, 0].tolist()
        if problem is not None:
            raise problem
        return flags.index(1.0) if any(flags) else None

    def _set_weights(self) -> None:
        """Copies the master weights to the model's parameters. All ranks call it."""
        self.state.set_weights()
        recorder.raise_if_stalled()  # an aborted collective leaves them incomplete

    def _counts(self) -> dict[str, int]:
        before = {"steps_before_run": self.steps_before_run} if self.steps_before_run else {}
        return {"optimizer_step": self.optimizer_step, **before}

    def _set_counts(self, values: Mapping[str, Any]) -> None:
        self.optimizer_step = int(values["optimizer_step"])
        self.steps_before_run = int(values.get("steps_before_run", 0))
        set_step(self.optimizer, self.optimizer_step)

    def _full_state(self) -> dict[str, torch.Tensor]:
        return {name: rows.local for name, rows in self.state.state().items()} | random_state(self.ranks)
