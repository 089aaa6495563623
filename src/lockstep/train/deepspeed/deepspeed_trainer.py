"""The DeepSpeed trainer: one rank of a policy with its optimizer, and the frozen reference if a KL term needs one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.micro_batch import MicroBatch
from lockstep.models.hf_checkpoint import named_weights
from lockstep.models.model_loader import context_length, resolve_dtype
from lockstep.models.packing_probe import PackingProbeResult, probe_packing
from lockstep.models.policy_model import PolicyModel
from lockstep.models.score_model import ScoreModel
from lockstep.train.checkpoints.checkpoint import CheckpointWriter, load_checkpoint
from lockstep.train.checkpoints.checkpoint_files import INHERITED, read_manifest
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.checkpoints.random_state import random_state, set_random_state
from lockstep.train.deepspeed.deepspeed_library import make_engine
from lockstep.train.deepspeed.engine_settings import engine_settings, offload_unsupported, zero_stage
from lockstep.train.deepspeed.published_weights import PublishedWeights
from lockstep.train.deepspeed.zero_model import Reference, load_model, register_head
from lockstep.train.deepspeed.zero_state import full_shape, make_state, reset_moments, set_step
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError, MemoryCheckpointMissing
from lockstep.train.forward.target_values import evaluate_each, target_values
from lockstep.train.lazy_weights import gather_buckets
from lockstep.train.metric_reduction import MetricAccumulator, ReducedMetrics
from lockstep.train.model_export import export_model
from lockstep.train.objective import check_fields, make_objective
from lockstep.train.optimizer import is_decayed, learning_rate, norm_parameter_ids, square_norm
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

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
        TrainerUnsupported: the settings contradict the run's config, or are not supported.
    """

    def __init__(self, role: TrainRole, ranks: ParallelContext, generation: int = 1) -> None:
        self.role, self.ranks, self.stage = role, ranks, zero_stage(role)
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        self.copies = ranks if self.stage == 3 else replace(ranks, replicas=ranks.world)
        """The ranks as holders of the model's parameters: below stage 3, each holds a copy."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        self.policy = load_model(role, ranks, role.seed)
        settings = engine_settings(role, dtype, *_sizes(self.policy))
        self.objective = with_router_loss(make_objective(role.objective), self.policy, role)
        self.weights = dict(named_weights(self.policy))
        self.optimizer = self._make_optimizer()
        self.engine = make_engine(ranks, self.policy, settings, self.optimizer)
        if self.stage == 3:
            register_head(self.policy)
        self.weights = dict(named_weights(self.policy))
        self.state = make_state(self.engine, self.stage, self.weights, ranks.rank == 0)
        self.published = PublishedWeights(self.weights, self.copies)
        self.has_reference = role.holds_reference
        self.reference = Reference(role, ranks, settings) if self.has_reference else None
        self.optimizer_step = 0
        """Number of optimizer steps taken, also those before a loaded checkpoint."""
        self.steps_before_run = 0
        """Optimizer steps of another run, from whose checkpoint this run started."""
        self.writer = CheckpointWriter(ranks if self.stage else self.copies, generation)

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
            for name, each in self.weights.items()
        ]

    def probe_packing(self) -> PackingProbeResult:
        """Finds out how rows may be packed for the model. All ranks call it."""
        return probe_packing(self.policy, self.compute_dtype)

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the requested values of each micro-batch, float32 `[targets]`.

        Raises:
            ValueError: reference log-probabilities are requested and no reference is loaded.
        """
        if "reference_logprobs" in outputs and self.reference is None:
            raise ValueError(
                "reference_logprobs are requested, but these ranks hold no reference: loss.kl.coefficient is 0, or the "
                "role `reference` serves it"
            )
        settings = self.ranks.device, self.role.temperature, self.role.trainer.head_chunk
        results: list[dict[str, np.ndarray]] = [{} for _ in microbatches]
        if policy_outputs := [name for name in outputs if name != "reference_logprobs"]:
            results = evaluate_each(self.policy, microbatches, policy_outputs, *settings)
        if "reference_logprobs" in outputs and self.reference is not None:
            values = evaluate_each(self.reference.policy, microbatches, ["logprobs"], *settings)
            for result, value in zip(results, values, strict=True):
                result["reference_logprobs"] = value["logprobs"]
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
        for done, microbatch in enumerate(microbatches, start=1):
            self.engine.set_gradient_accumulation_boundary(done == len(microbatches))
            self._backward(microbatch, metrics)
            current_beacon().progress("microbatches", done, len(microbatches))
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
        lr = self.learning_rate()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        recorder.raise_if_stalled()
        self.optimizer_step = step
        done = step - self.steps_before_run
        current_beacon().progress("optimizer steps", done, self.role.optimizer_steps)
        return StepStats({**totals.values, "grad_norm": totals.square_norm**0.5, "lr": lr})

    def learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""
        trainer = self.role.trainer
        step = self.optimizer_step - self.steps_before_run
        return learning_rate(step, trainer.optimizer.lr, trainer.schedule, self.role.optimizer_steps)

    def shards(self) -> Iterator[ParameterShard]:
        """Yields the rows of every weight that this rank publishes. All ranks call it."""
        for index, (name, weight) in enumerate(self.published.rows().items()):
            if index % self.copies.replicas != self.copies.replica:
                continue  # ranks with a copy take turns, so that every row is written once
            rows = weight.rows()
            if rows.numel():
                yield ParameterShard(name, weight.shape, self.copies.rows(weight.shape[0])[0], rows)

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Yields every weight, bucket by bucket; see `gather_buckets`."""
        return gather_buckets(self.published.rows(), buckets, self.copies, everyone)

    def save(self, folder: Path) -> None:
        """Begins to write trained parameters, optimizer, schedule step and random state; see `CheckpointWriter`."""
        self.writer.save(
            folder, self.state.state(), random_state(self.ranks), {**self._counts(), "model": self.role.model.path}
        )

    def saved(self) -> bool:
        """Returns whether the last `save` is complete on disk. Raises CheckpointError if it failed."""
        return self.writer.saved()

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote, also one of the FSDP2 trainer; see `FSDP2Trainer.load`.

        Raises:
            CheckpointError: the checkpoint is incomplete or belongs to another model; nothing was changed.
        """
        state, random = self.state.state(), random_state(self.ranks)
        copies = {
            name: replace(rows, local=torch.empty(rows.local.shape, dtype=rows.local.dtype))
            for name, rows in state.items()
        }
        problem: CheckpointError | None = None
        manifest: dict[str, Any] = {}
        try:
            inherited = read_manifest(folder).get(INHERITED)
            if inherited == "weights":
                copies = {name: rows for name, rows in copies.items() if name.startswith("parameter.")}
            manifest = load_checkpoint(folder, copies, random if inherited is None else {}, self.writer.ranks)
        except CheckpointError as error:
            problem = error
        failed = self._first_failed(problem, f"{folder.name} is read")
        if failed is not None:
            raise CheckpointError(folder, f"rank {failed} could not read its part; see its log")
        with torch.no_grad():
            for name, rows in copies.items():
                state[name].local.copy_(rows.local)
        self._set_weights()
        if inherited == "weights":
            reset_moments(self.optimizer)
            self.optimizer_step = self.steps_before_run = 0
            return
        self._set_counts(manifest)
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
        export_model(folder, self.policy, self.published.rows(), *described)

    def export_adapter(self, folder: Path) -> None:
        """Raises ValueError: there is no adapter."""
        raise ValueError("there is no adapter to export; set model.adapter")

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Raises TrainerUnsupported."""
        raise offload_unsupported(self.role)

    def onload(self) -> None:
        """Raises TrainerUnsupported."""
        self.offload()

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
        try:
            self.writer.finish()
        finally:
            self.engine.destroy()
            if self.reference is not None:
                self.reference.close()
            self.ranks.leave()

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW of torch, which needs no compiler, with the groups of the FSDP2 trainer."""
        settings, norms = self.role.trainer.optimizer, norm_parameter_ids(self.policy)
        decays = {name: is_decayed(name) and id(each) not in norms for name, each in self.weights.items()}
        groups = [
            {"params": [each for name, each in self.weights.items() if decays[name] is decayed], "weight_decay": decay}
            for decayed, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        present = [group for group in groups if group["params"]]
        return torch.optim.AdamW(present, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def _backward(self, microbatch: MicroBatch[np.ndarray], metrics: MetricAccumulator) -> None:
        batch, chunk = microbatch.to(self.ranks.device), self.role.trainer.head_chunk
        outputs = target_values(self.engine, batch, self.objective.outputs, self.role.temperature, chunk)
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


def _sizes(policy: PolicyModel) -> tuple[int, int]:
    """(size of the hidden states, number of parameters)."""
    parameters = sum(each.numel() for each in dict(named_weights(policy)).values())
    return int(policy.config.get_text_config().hidden_size), parameters
