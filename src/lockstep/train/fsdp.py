"""What is trained, as it was when the run began: the reference of a KL penalty where the model without its adapter is
another one, because the adapter was there before or weights are trained beside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.algorithm import CrossEntropy, PolicyLoss
from lockstep.config.recipes import RecipeConfig
from lockstep.data.micro_batch import DeviceMicroBatch, MicroBatch
from lockstep.models.lora import derived_seed, starts_from_other_weights, with_dropout, without_adapter
from lockstep.models.model_loader import resolve_dtype
from lockstep.models.policy_model import PolicyModel
from lockstep.train import checkpoint, objective
from lockstep.train.checkpoint import LocalRows
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import NonFinite
from lockstep.train.export import export_adapter, export_model
from lockstep.train.memory_checkpoint import MemoryCheckpoints
from lockstep.train.merged_weights import MergedWeights, gather_buckets
from lockstep.train.optimizer import (
    ShardedAdamW,
    clip_gradients,
    learning_rate,
    norm_parameter_ids,
    optimizer_steps,
    square_norm,
)
from lockstep.train.parallelize import (
    base_digests,
    begin_microbatch,
    free_gathered,
    load_sharded_policy,
    local_shard,
    parameter_dtype,
)
from lockstep.train.trainer_protocol import BucketWeights, EvaluateOutput, GatheredRows, ParameterShard, StepStats
from lockstep.watch.beacon import writer
from lockstep.watch.recorder import recorder


class InitialAdapter:
    """This rank's first rows, in host memory.

    Args:
        rows: of each trained parameter, by name.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rows.items()}

    @contextmanager
    def restored(self, rows: Mapping[str, Tensor]) -> Iterator[None]:
        """The first rows stand in `rows`, and afterwards again what stood there, bit by bit. No layer may be gathered
        when it begins or ends: what was gathered would stay as it is."""
        kept = {name: tensor.clone() for name, tensor in rows.items()}
        _copy_shards(self._rows, rows)
        try:
            yield
        finally:
            _copy_shards(kept, rows)


@torch.no_grad()
def _copy_shards(values: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    for name, tensor in rows.items():
        tensor.copy_(values[name])


class FSDP2Trainer:
    """One rank of a trainer (`lockstep.train.trainer_protocol.Trainer`).

    Dropout is off, as a ratio of two probabilities under different masks is noise; an adapter's own is on in steps.

    Args:
        config: of the run.
        ranks: from `lockstep.train.distributed.join_ranks`.
        generation: of the run, in the temporary names of checkpoints.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not fit it.
    """

    def __init__(self, config: RecipeConfig, ranks: ParallelContext, generation: int = 1) -> None:
        self.config, self.ranks = config, ranks
        self.compute = resolve_dtype(config.model.dtype, ranks.device)
        self.total_steps = optimizer_steps(config)
        self.adapter = config.model.adapter
        self.policy = load_sharded_policy(
            config, ranks, self.compute, parameter_dtype(config.model, ranks, self.compute), self.adapter
        )
        # A gathered layer puts plain parameters in the module's place: these are the ones that stay.
        self.outgoing = MergedWeights(self.policy, ranks)
        self.has_reference = isinstance(config.loss, PolicyLoss) and config.loss.kl.coefficient > 0
        self.reference: PolicyModel | None = None
        """A model of its own; with an adapter the reference is the policy without it, or as it was at first."""
        if self.has_reference and self.adapter is None:
            self.reference = load_sharded_policy(config, ranks, self.compute, self.compute).requires_grad_(False)
        elsewhere = self.adapter is not None and starts_from_other_weights(self.policy, self.adapter)
        self.beginning = InitialAdapter(self._rows()) if self.has_reference and elsewhere else None
        norms = norm_parameter_ids(self.policy)
        undecayed = [name for name, parameter in self.names.items() if id(parameter) in norms]
        self.optimizer = ShardedAdamW(self._rows(), config.trainer.optimizer, undecayed)
        self.writer = checkpoint.CheckpointWriter(ranks, generation)
        self.base = base_digests(config.model)
        """What a checkpoint of an adapter stands on."""
        self.offloaded = False

    @property
    def names(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained: with an adapter it and what is trained beside it, by names of peft's."""
        return self.outgoing.trained

    def evaluate(
        self, microbatches: Sequence[MicroBatch], want: Sequence[EvaluateOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Per micro-batch the wanted values, float32 `[targets]`, without gradients.

        Raises:
            ValueError: reference log-probabilities wanted and no reference loaded.
        """
        self._check_on_device()
        if "reference_logprobs" in want and not self.has_reference:
            raise ValueError("want has reference_logprobs, but loss.kl.coefficient is 0, so no reference is loaded")
        found: list[dict[str, np.ndarray]] = [{} for _ in microbatches]
        own = [name for name in want if name != "reference_logprobs"]
        with torch.no_grad():
            if own:
                self._look(microbatches, lambda row: self._values(row, own), found)
            if "reference_logprobs" in want:
                with self._as_reference() as reference:
                    self._look(microbatches, lambda row: self._reference_values(reference, row), found)
        for model in self._models():
            free_gathered(model)
        return found

    def step(self, microbatches: Sequence[MicroBatch], loss: PolicyLoss | CrossEntropy) -> StepStats:
        """One optimizer step on the sum of the losses of all targets of all ranks.

        Raises:
            ValueError: no micro-batches, or a field that the loss needs is missing; before any collective.
            NonFinite: on all ranks alike, before any weight is touched.
            CollectiveStalled: the observer has let go of this rank's collectives.
        """
        self._check_on_device()
        objective.check_fields(microbatches, loss)
        meter = objective.MetricAccumulator(self.ranks.device)
        with self._dropout():
            for done, packed in enumerate(microbatches, start=1):
                begin_microbatch(self.policy, done == len(microbatches), self.config.trainer.reshard_after_forward)
                self._seed(done)
                self._backward(DeviceMicroBatch.of(packed, self.ranks.device), loss, meter)
                writer.current_beacon().progress("microbatches", done, len(microbatches))
        gradients = {name: local_shard(p.grad) for name, p in self.names.items() if p.grad is not None}
        # Copies have the same gradient: it counts once.
        squares = square_norm(gradients if self.ranks.replica == 0 else {})
        everyone = self.ranks.gather(meter.vector(squares), why=f"metrics of step {self.optimizer.steps}")
        totals = objective.ReducedMetrics(everyone)
        try:
            self._refuse_non_finite(totals)
            norm = totals.square_norm**0.5
            lr = self.learning_rate()
            clip_gradients(gradients, norm, self.config.trainer.max_grad_norm)
            recorder.raise_if_stalled()  # NCCL ends a collective that is aborted without an error: its tensors are not to be used
            self.optimizer.step(self._rows(), gradients, lr)
        finally:
            for parameter in self.names.values():
                parameter.grad = None
        writer.current_beacon().progress("optimizer steps", self.optimizer.steps, self.total_steps)
        return StepStats({**totals.metrics(loss), "grad_norm": norm, "lr": lr})

    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        trainer = self.config.trainer
        return learning_rate(self.optimizer.steps, trainer.optimizer.lr, trainer.schedule, self.total_steps)

    def shards(self) -> Iterator[ParameterShard]:
        """This rank's rows of every weight, merged with the adapter, for weight sync. All ranks call it."""
        for index, (name, weight) in enumerate(self.outgoing.merged().items()):
            if index % self.ranks.replicas != self.ranks.replica:
                continue  # copies take turns, so that every row is written once
            rows = weight.rows()
            if rows.numel():
                yield ParameterShard(name, weight.shape, self.ranks.rows(weight.shape[0])[0], rows, weight.constant)

    def gathered(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Every weight, merged with the adapter, bucket by bucket; see
        `lockstep.train.merged_weights.gather_buckets`."""
        return gather_buckets(self.outgoing.merged(), buckets, self.ranks, everyone)

    def save(self, folder: Path) -> None:
        """Begins writing what is trained, optimizer, schedule step and random state; see `checkpoint.Writer`."""
        facts = {"optimizer_step": self.optimizer.steps, "model": self.config.model.path, **self.base}
        self.writer.save(folder, self._state(), self._random_state(), facts)

    def saved(self) -> bool:
        """Whether the last `save` is complete on disk; raises CheckpointError if it failed."""
        return self.writer.saved()

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint of any number of ranks.

        Raises:
            CheckpointError: torn, incomplete, or of another model; nothing is changed then.
        """
        self._check_on_device()
        for model in self._models():
            free_gathered(model)
        random = self._random_state()
        manifest = checkpoint.load_checkpoint(folder, self._state(), random, self.ranks, self.base)
        self.optimizer.steps = int(manifest["optimizer_step"])
        self._set_random_state(random)

    def copy_state(self, copies: MemoryCheckpoints, version: int) -> None:
        """Copies what a checkpoint would have into shared memory, as `version_numbers`. Raises NoRoomForCopy."""
        copies.write(version, self._everything(), {"optimizer_step": self.optimizer.steps})

    def load_copy(self, copies: MemoryCheckpoints, version: int) -> None:
        """Continues from a copy of as many ranks. Raises NoCopy."""
        self._check_on_device()
        for model in self._models():
            free_gathered(model)
        state = self._everything()
        with torch.no_grad():
            facts = copies.read(version, state)
        self.optimizer.steps = int(facts["optimizer_step"])
        self._set_random_state(state)

    def _everything(self) -> dict[str, Tensor]:
        return {name: rows.local for name, rows in self._state().items()} | self._random_state()

    def export(self, folder: Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, in the compute precision, merged.

        Rank 0 gathers parameter by parameter; no other rank holds more than its own rows.
        """
        export_model(folder, self.policy, self.outgoing.merged(), self.config.model, self.compute, self.ranks)

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. All ranks call it."""
        if self.adapter is None:
            raise ValueError("there is no adapter to export; set model.adapter")
        parts = self.outgoing.gather_adapter() | self.outgoing.gather_saved()
        export_adapter(folder, self.policy, parts, self.config.model, self.ranks)

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory, so that an engine can have the device's. Weights
        can be published and checkpoints written from there."""
        self._move(torch.device("cpu"), parameters, optimizer)
        self.offloaded = self.ranks.device.type != "cpu" and (parameters or optimizer)

    def onload(self) -> None:
        """Moves them back."""
        self._move(self.ranks.device, True, True)
        self.offloaded = False

    def close(self) -> None:
        """Ends the save under way and leaves the communicators. Raises CheckpointError."""
        try:
            self.writer.finish()
        finally:
            self.ranks.leave()

    def _dropout(self) -> AbstractContextManager[None]:
        return with_dropout(self.policy) if self.adapter and self.adapter.lora_dropout else nullcontext()

    def _seed(self, microbatch: int) -> None:
        """Masks of their own for each micro-batch, the same when a step is done again."""
        if self.adapter and self.adapter.lora_dropout:
            torch.manual_seed(derived_seed(self.config.seed, self.optimizer.steps, microbatch, self.ranks.rank))

    def _look(
        self,
        microbatches: Sequence[MicroBatch],
        values: Callable[[DeviceMicroBatch], dict[str, Tensor]],
        found: list[dict[str, np.ndarray]],
    ) -> None:
        """Adds the values of each micro-batch to those that were found."""
        for done, packed in enumerate(microbatches, start=1):
            values_now = values(DeviceMicroBatch.of(packed, self.ranks.device))
            found[done - 1] |= {name: value.float().cpu().numpy() for name, value in values_now.items()}
            writer.current_beacon().progress("microbatches", done, len(microbatches))

    def _values(self, row: DeviceMicroBatch, want: Sequence[EvaluateOutput]) -> dict[str, Tensor]:
        logprobs, entropy = self._forward(self.policy, row, entropy="entropy" in want)
        values = {"logprobs": logprobs, "entropy": entropy}
        return {name: value for name in want if (value := values[name]) is not None}

    def _reference_values(self, reference: PolicyModel, row: DeviceMicroBatch) -> dict[str, Tensor]:
        return {"reference_logprobs": self._forward(reference, row)[0]}

    @contextmanager
    def _as_reference(self) -> Iterator[PolicyModel]:
        """The reference: a model of its own, the policy without its adapter, or with what it began with."""
        if self.reference is not None:
            yield self.reference
        elif self.beginning is None:
            with without_adapter(self.policy):
                yield self.policy
        else:
            free_gathered(self.policy)
            with self.beginning.restored(self._rows()):
                try:
                    yield self.policy
                finally:
                    free_gathered(self.policy)

    def _backward(
        self, row: DeviceMicroBatch, loss: PolicyLoss | CrossEntropy, meter: objective.MetricAccumulator
    ) -> None:
        logprobs, entropy = self._forward(self.policy, row, entropy=isinstance(loss, PolicyLoss))
        outcome = objective.compute_loss(loss, row.fields, logprobs, entropy, row.sequences)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        meter.add(outcome)

    def _forward(
        self, model: PolicyModel, row: DeviceMicroBatch, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(log-probabilities, entropies) `[targets]` under the distribution that the engine samples from."""
        values: tuple[Tensor, Tensor | None] = model(
            row.tokens,
            row.layout,
            row.sources,
            row.targets,
            temperature=self._temperature(),
            chunk=self.config.trainer.head_chunk,
            entropy=entropy,
        )
        return values

    def _temperature(self) -> float:
        if isinstance(self.config.loss, CrossEntropy):
            return 1.0
        return self.config.rollout.sampling.temperature or 1.0

    def _refuse_non_finite(self, totals: objective.ReducedMetrics) -> None:
        if totals.bad_microbatches:
            raise NonFinite(self.optimizer.steps, "loss", list(totals.bad_microbatches))
        if totals.bad_gradients:
            raise NonFinite(self.optimizer.steps, "gradient", [(rank, None) for rank in totals.bad_gradients])

    def _rows(self) -> dict[str, Tensor]:
        return {name: local_shard(parameter) for name, parameter in self.names.items()}

    def _state(self) -> dict[str, LocalRows]:
        """Everything that is sharded by rows, under its name in checkpoints."""
        state = {}
        for name, parameter in self.names.items():
            shape = tuple(parameter.shape)
            state[f"parameter.{name}"] = LocalRows(local_shard(parameter), shape)
            state[f"exp_avg.{name}"] = LocalRows(self.optimizer.exp_avg[name], shape)
            state[f"exp_avg_sq.{name}"] = LocalRows(self.optimizer.exp_avg_sq[name], shape)
        return state

    def _random_state(self) -> dict[str, Tensor]:
        state = {f"random.cpu.{self.ranks.rank}": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            state[f"random.cuda.{self.ranks.rank}"] = torch.cuda.get_rng_state(self.ranks.device)
        return state

    def _set_random_state(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state[f"random.cpu.{self.ranks.rank}"])
        if self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state[f"random.cuda.{self.ranks.rank}"], self.ranks.device)

    def _models(self) -> list[PolicyModel]:
        return [self.policy] if self.reference is None else [self.policy, self.reference]

    def _move(self, device: torch.device, parameters: bool, optimizer: bool) -> None:
        for model in self._models() if parameters else []:
            free_gathered(model)
            model.to(device)
        self.outgoing = MergedWeights(self.policy, self.ranks)
        if optimizer:
            self.optimizer.to(device)
        if device.type == "cpu" and self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other process on this device

    def _check_on_device(self) -> None:
        if self.offloaded:
            raise RuntimeError("the trainer is offloaded to host memory; call onload() first")
