"""The memory and the collectives of the DeepSpeed trainer, computed before any rank starts."""

from typing import get_args

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.models.model_facts import ModelFacts
from lockstep.train.deepspeed.deepspeed_library import require_deepspeed
from lockstep.train.deepspeed.engine_settings import (
    KIND,
    engine_settings,
    may_change_layers,
    offloads,
    overlaps_reduction,
    second_copy_ranks,
    zero_stage,
)
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.metric_reduction import metric_vector_size
from lockstep.train.objective import make_objective
from lockstep.train.trainer_plan import (
    DTYPE_BYTES,
    PlannedCollective,
    TrainerPlanner,
    forward_memory,
)


class DeepSpeedPlanner(TrainerPlanner):
    """The planner of `DeepSpeedTrainer`."""

    outputs = frozenset(get_args(TrainerOutput))
    moves_reference = False

    def check(self, role: TrainRole) -> None:
        trainer, field = role.trainer, role.field("trainer.kind")
        if role.model.quantization is not None:
            raise TrainerUnsupported(KIND, role.field("model.quantization"), f"leave it out, or set {field}=fsdp2")
        path = role.field("trainer.deepspeed.zero_optimization")
        if trainer.compile == "layers" and not self.compiles_layers(role):
            remedy = f"leave it out, or set {path}.stage=1 without overlap_comm, or {field}=fsdp2"
            raise TrainerUnsupported(KIND, role.field("trainer.compile"), remedy)
        if trainer.replicas > 1:
            remedy = (
                f"DeepSpeed divides the optimizer over all ranks. For a second copy of the parameters on every "
                f"{trainer.shards} ranks, set {role.field('trainer.replicas')}=1, {path}.stage=3 and "
                f"{path}.zero_hpz_partition_size={trainer.shards}; or set {field}=fsdp2"
            )
            raise TrainerUnsupported(KIND, role.field("trainer.replicas"), remedy)
        if not trainer.reshard_after_forward and zero_stage(role) == 3:
            setting = f"{role.field('trainer.reshard_after_forward')} false at stage 3"
            raise TrainerUnsupported(KIND, setting, "stage 3 frees gathered parameters: leave it out, or set stage 2")
        _check_settings(role)
        require_deepspeed(field)

    def compiles_layers(self, role: TrainRole) -> bool:
        return may_change_layers(role)

    def memory(self, role: TrainRole, model: ModelFacts, token_budget: int) -> dict[str, int]:
        """Estimates the bytes of one rank (Rajbhandari et al. 2020, section 3.1). Beside the parameters in compute
        precision, DeepSpeed keeps fp32 master weights, except at stage 0, gradients in the precision of their sums, and
        whole buckets of gradients that are being reduced. With an adapter, only what is trained has these; the other
        weights are in compute precision.
        """
        stage, ranks, adapter = zero_stage(role), role.trainer.ranks, model.adapter
        width, trained = DTYPE_BYTES[model.dtype], model.trained
        frozen = model.frozen if adapter is None else model.parameters - adapter.saved
        settings = engine_settings(role, model.dtype, model.hidden, trained, model.device)
        accumulated = 4 if settings.get("data_types") == {"grad_accum_dtype": "fp32"} else width
        held = trained // ranks
        # At stage 1, sums in another precision than the gradients are beside them.
        whole = width * trained + (accumulated * trained if accumulated != width else 0)
        parts = {
            "weights": width * (held if stage == 3 else trained),
            "master weights": 0 if stage == 0 else 4 * held,
            "gradients": accumulated * held if stage >= 2 else whole,
            "optimizer": 8 * (held if stage else trained),
        }
        if frozen:
            parts["frozen weights"] = width * (frozen // ranks if stage == 3 else frozen)
        if adapter is not None:
            parts["merged adapter"] = 4 * adapter.parameters
        if (shared := second_copy_ranks(role)) > 1:
            parts["second copy"] = width * (trained + frozen) // shared
        in_host_memory = _in_host_memory(role, model, stage)
        parts = {name: size for name, size in parts.items() if name not in in_host_memory}
        if stage:
            overlapped = stage < 3 and overlaps_reduction(role)  # one bucket is filled while another is reduced
            bucket = int(settings["zero_optimization"]["reduce_bucket_size"])
            parts["buckets"] = (accumulated if stage == 1 else width) * bucket * (2 if overlapped else 1)
        if stage == 3 and (ranks > 1 or "weights" in in_host_memory):
            parts["gathered"] = width * (model.root + 2 * model.largest_layer)
        parts |= forward_memory(role, model, token_budget)
        if role.holds_reference and adapter is None and "weights" not in in_host_memory:
            parts["reference"] = width * (model.parameters // ranks if stage == 3 else model.parameters)
        return parts

    def memory_checkpoint(self, role: TrainRole, model: ModelFacts) -> int:
        """Returns the bytes of fp32 weights and two Adam moments; of every rank at stage 0."""
        return 2 * 12 * model.trained * (1 if zero_stage(role) else role.trainer.ranks)

    def collectives(self, role: TrainRole, model: ModelFacts, updates: int, publishes: bool) -> list[PlannedCollective]:
        if role.trainer.ranks == 1:
            return []
        width, stage = DTYPE_BYTES[model.dtype], zero_stage(role)
        metrics = metric_vector_size(make_objective(role.objective).metrics)
        size = width * model.trained
        norm = PlannedCollective("all_gather", "trainer", f"{updates} (gradient norm and metrics)", 8 * metrics)
        if stage == 3:
            largest = width * model.largest_layer
            return [
                norm,
                PlannedCollective(
                    "all_gather", "trainer", "for each module of each micro-batch, by DeepSpeed", largest
                ),
                PlannedCollective("reduce_scatter", "trainer", "for each bucket of gradients, by DeepSpeed", largest),
                *_merging(model, publishes),
            ]
        how = "per micro-batch" if stage == 2 else "per optimizer step"
        operation = "all_reduce" if stage < 2 else "reduce"
        found = [norm, PlannedCollective(operation, "trainer", f"buckets of gradients, {how}", size)]
        if stage:
            found.append(PlannedCollective("all_gather", "trainer", f"{updates} (updated weights, in buckets)", size))
        return found


def _in_host_memory(role: TrainRole, model: ModelFacts, stage: int) -> list[str]:
    """The parts of a rank's memory that are not on its device. On a CPU, offloading frees nothing."""
    if model.device == "cpu":
        return []
    optimizer = ["master weights", "optimizer", *(["gradients"] if stage >= 2 else [])]
    parameters = ["weights", "frozen weights", "second copy"]
    return [
        *(optimizer if offloads(role, "offload_optimizer") else []),
        *(parameters if offloads(role, "offload_param") else []),
    ]


def _merging(model: ModelFacts, publishes: bool) -> list[PlannedCollective]:
    """The collective in which every rank of stage 3 gets the whole adapter."""
    if model.adapter is None or not publishes:
        return []
    times = "1 (the adapter, before its weights are published)"
    return [PlannedCollective("all_gather", "trainer", times, 4 * model.adapter.parameters)]


def _check_settings(role: TrainRole) -> None:
    """Raises TrainerUnsupported for DeepSpeed settings that contradict the run's config. Which precision `auto` is
    depends on the ranks' devices, which compare it themselves: here it may be either."""
    if role.model.dtype != "auto":
        engine_settings(role, role.model.dtype, hidden=1, parameters=1)
        return
    try:
        engine_settings(role, "float32", hidden=1, parameters=1)
    except TrainerUnsupported:
        engine_settings(role, "bfloat16", hidden=1, parameters=1)
