"""A plain data-parallel trainer: every rank holds the whole model, gradients are added, and torch's AdamW updates them.

It shows that the trainer protocol suffices for another kind of trainer than those of the package. After `register()`,
`trainer.kind: replicated` is a kind like the others; importing this file changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base import waits
from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TRAINER_KINDS
from lockstep.data.micro_batch import MicroBatch
from lockstep.models.hf_checkpoint import named_weights
from lockstep.models.model_facts import ModelFacts
from lockstep.models.model_loader import context_length, load_policy, resolve_dtype
from lockstep.models.packing_probe import PackingProbeResult, probe_fused_decoder, probe_packing
from lockstep.models.policy_model import PolicyModel
from lockstep.train.checkpoints.checkpoint import CheckpointWriter, LocalRows, load_checkpoint
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.decoder_layers import prepare_layers
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.lazy_weights import LazyWeight
from lockstep.train.metric_reduction import MetricAccumulator, ReducedMetrics, metric_vector_size
from lockstep.train.model_export import export_model
from lockstep.train.objective import ModelOutput, check_fields, make_objective
from lockstep.train.optimizer import clip_gradients, learning_rate, optimizer_groups, square_norm
from lockstep.train.router_objective import with_router_loss
from lockstep.train.trainer_kinds import TRAINERS, TrainerKind
from lockstep.train.trainer_plan import PlannedCollective, TrainerPlanner
from lockstep.train.trainer_protocol import BucketWeights, GatheredRows, ParameterInfo, ParameterShard, StepStats
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder import recorder

KIND = "replicated"


class ReplicatedTrainer:
    """One rank of a trainer (`lockstep.train.trainer_protocol.Trainer`)."""

    def __init__(
        self, role: TrainRole, ranks: ParallelContext, generation: int = 1, images: Path | None = None
    ) -> None:
        self.role, self.ranks = role, ranks
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        if self.compute_dtype != torch.float32:
            raise TrainerUnsupported(KIND, f"{self.compute_dtype} on {ranks.device}", "set model.dtype=float32")
        self.policy = self._load_model()
        self.has_reference = role.holds_reference
        self.reference = self._load_model().requires_grad_(False) if self.has_reference else None
        self.objective = with_router_loss(make_objective(role.objective), self.policy, role)
        self.weights = dict(named_weights(self.policy))
        self.optimizer = self._make_optimizer()
        self.optimizer_step = 0
        self.has_new_head = False
        self.writer = CheckpointWriter(ranks, generation)

    @property
    def context_length(self) -> int:
        return context_length(self.policy.config)

    def parameters(self) -> list[ParameterInfo]:
        return [ParameterInfo(name, tuple(weight.shape), "float32") for name, weight in self.weights.items()]

    def probe_packing(self) -> PackingProbeResult:
        return probe_packing(self.policy, self.compute_dtype)

    @torch.no_grad()
    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        if "reference_logprobs" in outputs and self.reference is None:
            raise ValueError("reference_logprobs are requested, and there is no reference")
        results = []
        for done, microbatch in enumerate(microbatches, start=1):
            batch = microbatch.to(self.ranks.device)
            values: dict[str, Tensor] = dict(self._forward(self.policy, batch, ["entropy"]))
            if self.reference is not None:
                values["reference_logprobs"] = self._forward(self.reference, batch)["logprobs"]
            results.append({name: values[name].float().cpu().numpy() for name in outputs})
            current_beacon().progress("microbatches", done, len(microbatches))
        return results

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> StepStats:
        check_fields(microbatches, self.objective)
        metrics = MetricAccumulator(self.objective.metrics, self.ranks.device)
        try:
            for done, microbatch in enumerate(microbatches, start=1):
                batch = microbatch.to(self.ranks.device)
                outputs = self._forward(self.policy, batch, self.objective.outputs)
                outcome = self.objective.compute(batch.fields, outputs, batch.sequences)
                outcome.loss.backward()
                metrics.add(outcome)
                current_beacon().progress("microbatches", done, len(microbatches))
            gradients = self._add_gradients()
            # Every rank has the whole gradient; only one of them adds it to the norm.
            squares = square_norm(gradients if self.ranks.rank == 0 else {})
            vectors = self.ranks.gather(
                metrics.vector(squares), why=f"metrics of optimizer step {self.optimizer_step + 1}"
            )
            totals = ReducedMetrics(self.objective.metrics, vectors)
            return self._update(gradients, totals)
        finally:
            self.optimizer.zero_grad()

    def shards(self) -> Iterator[ParameterShard]:
        for name, rows in self._rows().items():
            if rows.numel():
                shape = tuple(self.weights[name].shape)
                yield ParameterShard(name, shape, self.ranks.rows(shape[0])[0], rows)

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        for bucket in buckets:
            if self.ranks.rank and not everyone:
                yield None
            else:
                wanted = [(name, self.weights[name].detach().to(dtype)) for name, dtype in bucket]
                yield {name: [weight.reshape(-1).view(torch.uint8)] for name, weight in wanted}

    def save(self, folder: Path) -> None:
        shares = {name: LocalRows(self._share(whole), tuple(whole.shape)) for name, whole in self._state().items()}
        self.writer.save(folder, shares, {}, {"optimizer_step": self.optimizer_step, "model": self.role.model.path})

    def saved(self) -> bool:
        return self.writer.saved()

    def load(self, folder: Path) -> None:
        everything = {name: LocalRows(whole, tuple(whole.shape)) for name, whole in self._state().items()}
        manifest = load_checkpoint(folder, everything, {}, ParallelContext())  # as if there were one rank
        self.optimizer_step = int(manifest["optimizer_step"])
        for state in self.optimizer.state.values():
            state["step"].fill_(self.optimizer_step)

    def save_to_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        raise TrainerUnsupported(KIND, "memory checkpoints", "set recovery.memory_copy to auto or false")

    def load_from_memory(self, checkpoints: MemoryCheckpoints, version: int) -> None:
        self.save_to_memory(checkpoints, version)

    def export(self, folder: Path, added: Mapping[str, Any] = MappingProxyType({})) -> None:
        rows = {
            name: LazyWeight(tuple(weight.shape), lambda weight=weight: self._share(weight.detach()))
            for name, weight in self.weights.items()
        }
        export_model(folder, self.policy, rows, self.role.model, self.compute_dtype, self.ranks, added)

    def export_adapter(self, folder: Path) -> None:
        raise ValueError("there is no adapter to export; set model.adapter")

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        raise TrainerUnsupported(KIND, "trainer.offload", "leave it out")

    def onload(self) -> None:
        raise TrainerUnsupported(KIND, "trainer.offload", "leave it out")

    def close(self) -> None:
        try:
            self.writer.finish()
        finally:
            self.ranks.leave()

    def _load_model(self) -> PolicyModel:
        policy = load_policy(self.role.model, self.ranks.device, dtype=torch.float32)
        prepare_layers(policy, self.role.trainer, self.ranks.device, self.compute_dtype)
        probe_fused_decoder(policy)
        return policy

    def _make_optimizer(self) -> torch.optim.AdamW:
        settings = self.role.trainer.optimizer
        groups = optimizer_groups(
            self.policy, self.weights, dict.fromkeys(self.weights, "language"), settings.weight_decay
        )
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
        for weight in self.weights.values():  # else the moments do not exist before the first step
            moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            optimizer.state[weight] = {"step": torch.zeros(()), **moments}
        return optimizer

    def _forward(
        self, model: PolicyModel, batch: MicroBatch[Tensor], outputs: Sequence[ModelOutput] = ()
    ) -> dict[ModelOutput, Tensor]:
        logprobs, entropy = model(
            batch.tokens,
            batch.layout(),
            batch.sources,
            batch.targets,
            temperature=self.role.temperature,
            chunk=self.role.trainer.head_chunk,
            entropy="entropy" in outputs,
        )
        return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}

    def _add_gradients(self) -> dict[str, Tensor]:
        """Adds the gradients of all ranks, in float32 and one collective."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.weights.values()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self.ranks.world > 1:
            work = dist.all_reduce(flat, group=self.ranks.group, async_op=True)
            why, limit = f"gradients of optimizer step {self.optimizer_step + 1}", self.ranks.timeout_s
            waits.work(work, communicator="trainer", operation="all_reduce", why=why, timeout_s=limit)
        parts = flat.split([weight.numel() for weight in self.weights.values()])
        for weight, part in zip(self.weights.values(), parts, strict=True):
            weight.grad = part.view_as(weight)
        return {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}

    def _update(self, gradients: dict[str, Tensor], totals: ReducedMetrics) -> StepStats:
        step, trainer = self.optimizer_step, self.role.trainer
        totals.check_finite(step + 1)
        norm = totals.square_norm**0.5
        lr = learning_rate(step, trainer.optimizer.lr, trainer.schedule, self.role.optimizer_steps)
        clip_gradients(gradients, norm, trainer.max_grad_norm)
        recorder.raise_if_stalled()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer_step += 1
        current_beacon().progress("optimizer steps", self.optimizer_step, self.role.optimizer_steps)
        return StepStats({**totals.values, "grad_norm": norm, "lr": lr})

    def _share(self, whole: Tensor) -> Tensor:
        first, last = self.ranks.rows(whole.shape[0])
        return whole[first:last]

    def _rows(self) -> dict[str, Tensor]:
        """The rows that this rank publishes."""
        return {name: self._share(weight.detach()) for name, weight in self.weights.items()}

    def _state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint contains, by name; the same on every rank."""
        state = {f"weight.{name}": weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            state |= {f"{part}.{name}": self.optimizer.state[weight][part] for part in ("exp_avg", "exp_avg_sq")}
        return state


class ReplicatedPlanner(TrainerPlanner):
    """The planner of `ReplicatedTrainer`."""

    outputs: frozenset[TrainerOutput] = frozenset({"logprobs", "entropy", "reference_logprobs"})
    moves_reference = False

    def check(self, role: TrainRole) -> None:
        lacking = {
            "model.adapter": role.model.adapter is not None,
            "model.dtype": role.model.dtype not in ("auto", "float32"),
            "trainer.replicas": role.trainer.replicas > 1,
            "trainer.offload": role.trainer.offload.anything,
        }
        for setting, is_set in lacking.items():
            if is_set:
                raise TrainerUnsupported(KIND, setting, "leave it out, or set trainer.kind=fsdp2")

    def compiles_layers(self, role: TrainRole) -> bool:
        return False

    def memory(self, role: TrainRole, model: ModelFacts, token_budget: int) -> dict[str, int]:
        return {
            "weights": 4 * model.parameters,
            "gradients": 4 * model.parameters,
            "optimizer": 8 * model.parameters,
            "activations": 68 * token_budget * model.hidden * model.layers,
            "reference": 4 * model.parameters if role.holds_reference else 0,
        }

    def memory_checkpoint(self, role: TrainRole, model: ModelFacts) -> None:
        return None

    def collectives(self, role: TrainRole, model: ModelFacts, updates: int, publishes: bool) -> list[PlannedCollective]:
        if role.trainer.ranks == 1:
            return []
        metrics = metric_vector_size(make_objective(role.objective).metrics)
        return [
            PlannedCollective("all_reduce", "trainer", f"{updates} (gradients)", 4 * model.parameters),
            PlannedCollective("all_gather", "trainer", f"{updates} (gradient norm and metrics)", 8 * metrics),
        ]


def register() -> None:
    """Makes `trainer.kind: replicated` known to this process."""
    if KIND not in TRAINERS:
        TRAINER_KINDS.append(KIND)
        TRAINERS[KIND] = TrainerKind(ReplicatedTrainer, ReplicatedPlanner())


@contextmanager
def registered() -> Iterator[None]:
    """Makes the kind known during the context."""
    register()
    try:
        yield
    finally:
        TRAINER_KINDS.remove(KIND)
        del TRAINERS[KIND]
