"""The memory and the collectives of the FSDP2 trainer, computed before any rank starts."""

from collections.abc import Iterator
from typing import get_args

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.serve_role import ServeRole
from lockstep.config.train_role import TrainRole
from lockstep.models.model_facts import ModelFacts
from lockstep.models.vision.vision_facts import VisionFacts
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.metric_reduction import metric_vector_size
from lockstep.train.objective import make_objective
from lockstep.train.router_objective import ROUTER_METRICS
from lockstep.train.served_model import ServedModelPlanner
from lockstep.train.trainer_plan import (
    DTYPE_BYTES,
    PlannedCollective,
    TrainerPlanner,
    forward_memory,
)


class FSDP2Planner(TrainerPlanner):
    """The planner of `FSDP2Trainer`."""

    outputs = frozenset(get_args(TrainerOutput))
    moves_reference = True

    def check(self, role: TrainRole) -> None:
        """Raises TrainerUnsupported for a quantized model that would have to be sharded or moved."""
        if role.model.quantization is None:
            return
        quantization = role.field("model.quantization")
        if role.trainer.ranks > 1:
            setting, one = f"{quantization} with {role.field('trainer.ranks')} {role.trainer.ranks}", "trainer.ranks=1"
            remedy = f"bitsandbytes weights cannot be sharded: set {role.field(one)}, or leave the quantization out"
            raise TrainerUnsupported(role.trainer.kind, setting, remedy)
        if role.trainer.offload.parameters:
            offload = role.field("trainer.offload.parameters")
            remedy = f"quantized weights stay on the GPU: set {offload}=false"
            raise TrainerUnsupported(role.trainer.kind, f"{quantization} with {offload}", remedy)

    def compiles_layers(self, role: TrainRole) -> bool:
        return True

    def memory(self, role: TrainRole, model: ModelFacts, token_budget: int) -> dict[str, int]:
        """Estimates the bytes of one rank: its shard of fp32 weights, gradients and two Adam moments (Rajbhandari et
        al. 2020, section 3.1), the root and two layers that FSDP2 gathers in compute precision, the activations of one
        row (of all rows whose forward pass is kept, if they are more), and the logits of one chunk. With an adapter,
        only the adapter has gradients and moments; the model's weights are in compute precision, and merging needs the
        whole adapter.
        """
        trainer, adapter, width = role.trainer, model.adapter, DTYPE_BYTES[model.dtype]
        trained = model.trained
        parts = {
            "weights": 4 * trained // trainer.shards,
            "gradients": 4 * trained // trainer.shards,
            "optimizer": 8 * trained // trainer.shards,
        }
        if adapter is not None:
            frozen = role.model.quantization
            # including the constants of the blocks
            bits = 8.0 * width if frozen is None else {"nf4": 4.5, "int8": 8.0}[frozen.kind]
            divided = int(bits * (model.parameters - model.copied - adapter.saved) / 8) // trainer.shards
            parts["frozen weights"] = divided + width * model.copied
            parts["merged adapter"] = 4 * adapter.parameters
        elif model.frozen:
            parts["frozen weights"] = width * ((model.frozen - model.copied) // trainer.shards + model.copied)
        if trainer.ranks > 1:
            parts["gathered"] = width * (model.root + 2 * model.largest_layer)
        parts |= forward_memory(role, model, max(1, role.kept_microbatches) * token_budget)
        if role.holds_reference and adapter is None:
            parts["reference"] = width * ((model.parameters - model.copied) // trainer.shards + model.copied)
        return parts

    def memory_checkpoint(self, role: TrainRole, model: ModelFacts) -> int:
        """Returns the bytes of fp32 weights and two Adam moments, of every copy of the parameters, and those of a
        reference that moves."""
        trained = model.trained if model.adapter is None else model.adapter.parameters
        moving = 0 if role.objective.reference_mixing is None else DTYPE_BYTES[model.dtype]
        return 2 * (12 + moving) * trained * role.trainer.replicas

    def collectives(self, role: TrainRole, model: ModelFacts, updates: int, publishes: bool) -> list[PlannedCollective]:
        if role.trainer.ranks == 1:
            return []
        adapter, width = model.adapter, DTYPE_BYTES[model.dtype]
        reduced = model.layers + 1 if adapter is None else adapter.trained_blocks
        largest = _largest_unit(model)
        scattered = largest if adapter is None else adapter.trained // max(adapter.trained_blocks, 1)
        router = ROUTER_METRICS if model.router_aux_loss else {}
        metrics = metric_vector_size({**make_objective(role.objective).metrics, **router})
        before, gathers = _gathers(role, model, updates)
        found = []
        if _outputs_of_every_step(role):
            found = [PlannedCollective("all_gather", "fsdp", before, largest * width)]
        times = f"{reduced * updates} ({reduced} per optimizer step)"
        norm = f"{updates} (gradient norm and metrics, one vector)"
        found += [
            PlannedCollective("all_gather", "fsdp", gathers, largest * width),
            PlannedCollective("reduce_scatter", "fsdp", times, scattered * 4),
            *_replica_collectives(role, reduced * updates, scattered * 4),
            PlannedCollective("all_gather", "trainer", norm, metrics * 8),
        ]
        if model.vision is not None and model.vision_units:
            found += _vision_collectives(role, model.vision, model.vision_units, updates, width)
        if adapter is not None and publishes:
            merge = "1 (the adapter, before its weights are published)"
            found.append(PlannedCollective("all_gather", "trainer", merge, adapter.parameters * 4))
        for why in _further_evaluations(role):
            times = f"{_evaluation_gathers(role, model)} ({why})"
            found.append(PlannedCollective("all_gather", "fsdp", times, largest * width))
        return found


class FSDP2ServedModelPlanner(ServedModelPlanner):
    """The planner of `FSDP2ServedModel`."""

    def memory(self, role: ServeRole, model: ModelFacts, token_budget: int) -> int:
        """Estimates the bytes of one rank: its shard of the weights, the gathered layers, and the activations of one
        layer and of one chunk of the head, since nothing is kept for a backward pass."""
        width = DTYPE_BYTES[model.dtype]
        weights = width * ((model.parameters - model.copied) // role.ranks + model.copied)
        gathered = width * (model.root + 2 * model.largest_layer) if role.ranks > 1 else 0
        logits = 0 if role.model.head == "score" else role.head_chunk * model.vocabulary * 4
        return weights + gathered + 17 * token_budget * model.hidden * width + logits

    def collectives(self, role: ServeRole, model: ModelFacts) -> list[PlannedCollective]:
        if role.ranks == 1:
            return []
        times = f"{model.layers} per micro-batch, and 1 ({', '.join(role.fields) or 'evaluation'})"
        return [PlannedCollective("all_gather", "fsdp", times, _largest_unit(model) * DTYPE_BYTES[model.dtype])]


def _largest_unit(model: ModelFacts) -> int:
    """Number of parameters that the largest all-gather makes: those of a layer, or of the embedding."""
    embedding = model.hidden * model.vocabulary
    seeing = 0 if model.vision is None else model.vision.tower + model.vision.projector
    return max((model.parameters - seeing - embedding) // max(model.layers, 1), embedding)


def _gathers(role: TrainRole, model: ModelFacts, updates: int) -> tuple[str, str]:
    """How often parameters are gathered before training, and while training."""
    layers, units, adapter = model.layers, model.layers + 1, model.adapter
    # FSDP2 gathers one layer ahead of the next backward, even if there is none.
    backward = layers if adapter is None else layers - max(adapter.first_trained_layer - 1, 0)
    models = len({output == "reference_logprobs" for output in _outputs_of_every_step(role)})
    # The policy without its adapter serves as the reference, unless the adapter was loaded with weights.
    held = models if adapter is None or adapter.reference_differs_from_base else min(models, 1)
    if role.trainer.reshard_after_forward:
        # A layer is gathered again for its backward; the root (embedding, last norm, head) is kept until then.
        gathers = f"{layers + backward + 1} per micro-batch"
    else:
        gathers = f"{units * updates} ({units} per optimizer step)"
    return f"{_evaluation_gathers(role, model, models, held)} (log-probabilities before training)", gathers


def _vision_collectives(
    role: TrainRole, vision: VisionFacts, units: int, updates: int, width: int
) -> list[PlannedCollective]:
    """What a tower and a projector of which anything is trained add if the data has images: every row calls them, also
    one without images."""
    if role.trainer.reshard_after_forward:
        times = f"{2 * units} per micro-batch (tower and projector, if the data has images; half in an evaluation)"
    else:
        times = f"{units * updates} (tower and projector, if the data has images)"
    reduced = f"{units * updates} (gradients of tower and projector)"
    return [
        PlannedCollective("all_gather", "fsdp", times, vision.largest_unit * width),
        PlannedCollective("reduce_scatter", "fsdp", reduced, vision.largest_unit * 4),
    ]


def _outputs_of_every_step(role: TrainRole) -> set[TrainerOutput]:
    """What the ranks evaluate before the first update of every step."""
    return {*role.evaluated_fields.values()} - {*role.outputs_of_divided_pairs}


def _evaluation_gathers(role: TrainRole, model: ModelFacts, models: int = 1, held: int = 1) -> str:
    """How often parameters are gathered for an evaluation.

    Args:
        models: forward passes of each micro-batch.
        held: separate models, each of which keeps its root (embedding, last norm, head).
    """
    if role.trainer.reshard_after_forward:
        return f"{models * model.layers} per micro-batch, and {held}"
    return f"{held * (model.layers + 1)}"


def _further_evaluations(role: TrainRole) -> Iterator[str]:
    """The evaluations that not every step has: what is computed, and when."""
    if outputs := role.outputs_of_divided_pairs:
        yield f"{', '.join(outputs)} before training, only if pairs are divided among rows"
    if role.precomputed_fields:
        yield "log-probabilities of the reference, only before the first step, for each file of them"


def _replica_collectives(role: TrainRole, times: int, size: int) -> list[PlannedCollective]:
    """The collectives that HSDP adds: gradients are summed across replicas."""
    trainer = role.trainer
    if trainer.replicas == 1:
        return []
    return [PlannedCollective("all_reduce", "replicas", f"{times} (gradients, across copies)", size // trainer.shards)]
