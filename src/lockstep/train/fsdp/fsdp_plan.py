"""The memory and the collectives of the FSDP2 trainer, computed before any rank starts."""

from lockstep.config.train_role import TrainRole
from lockstep.models.model_facts import ModelFacts
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.objective import make_objective, metric_vector_size
from lockstep.train.router_objective import ROUTER_METRICS
from lockstep.train.trainer_plan import DTYPE_BYTES, PlannedCollective, TrainerPlanner


class FSDP2Planner(TrainerPlanner):
    """The planner of `FSDP2Trainer`."""

    def check(self, role: TrainRole) -> None:
        """Raises TrainerUnsupported for a quantized model that would have to be sharded or moved."""
        if role.model.quantization is None:
            return
        if role.trainer.ranks > 1:
            setting = f"model.quantization with trainer.ranks {role.trainer.ranks}"
            remedy = "bitsandbytes weights cannot be sharded: set trainer.ranks=1, or leave the quantization out"
            raise TrainerUnsupported(role.trainer.kind, setting, remedy)
        if role.trainer.offload.parameters:
            remedy = "quantized weights stay on the GPU: set trainer.offload.parameters=false"
            raise TrainerUnsupported(role.trainer.kind, "model.quantization with trainer.offload.parameters", remedy)

    def memory(self, role: TrainRole, model: ModelFacts, token_budget: int) -> int:
        """Estimates the bytes of one rank: its shard of fp32 weights, gradients and two Adam moments, and the
        activations of one row. With an adapter, only the adapter has gradients and moments; the model's weights are in
        compute precision.

        Activations follow Korthikanti et al. 2022 (eq. 2): `34 * tokens * hidden` bytes per layer in 16 bit, without
        the attention term, as attention keeps no scores. In 32 bit it is twice as much; with checkpointing, one tensor
        per layer.
        """
        width, adapter = DTYPE_BYTES[model.dtype], model.adapter
        if adapter is None:
            states = 16 * model.parameters // role.trainer.shards
        else:  # merging needs the whole adapter
            frozen = role.model.quantization
            # including the constants of the blocks
            bits = 8 * width if frozen is None else {"nf4": 4.5, "int8": 8.0}[frozen.kind]
            sharded = int(bits * (model.parameters - adapter.saved) / 8) + 16 * adapter.trained
            states = sharded // role.trainer.shards + 4 * adapter.parameters
        per_layer = (2 if role.trainer.activation_checkpointing else 34) * token_budget * model.hidden
        activations = per_layer * model.layers * width // 2
        head = 3 * role.trainer.head_chunk * model.vocabulary * 4
        reference = 0
        if role.objective.needs_reference and adapter is None:
            reference = model.parameters * width // role.trainer.shards
        return states + activations + head + reference

    def memory_checkpoint(self, role: TrainRole, model: ModelFacts) -> int:
        """Returns the bytes of fp32 weights and two Adam moments, of every copy of the parameters."""
        trained = model.parameters if model.adapter is None else model.adapter.parameters
        return 2 * 12 * trained * role.trainer.replicas

    def collectives(self, role: TrainRole, model: ModelFacts, updates: int, publishes: bool) -> list[PlannedCollective]:
        if role.trainer.ranks == 1:
            return []
        adapter, width = model.adapter, DTYPE_BYTES[model.dtype]
        reduced = model.layers + 1 if adapter is None else adapter.trained_blocks
        embedding = model.hidden * model.vocabulary
        largest = max((model.parameters - embedding) // max(model.layers, 1), embedding)
        scattered = largest if adapter is None else adapter.trained // max(adapter.trained_blocks, 1)
        router = ROUTER_METRICS if model.router_aux_loss else {}
        metrics = metric_vector_size({**make_objective(role.objective).metrics, **router})
        before, gathers = _gathers(role, model, updates)
        found = []
        if role.objective.evaluated_fields:
            found = [PlannedCollective("all_gather", "fsdp", before, largest * width)]
        times = f"{reduced * updates} ({reduced} per optimizer step)"
        norm = f"{updates} (gradient norm and metrics, one vector)"
        found += [
            PlannedCollective("all_gather", "fsdp", gathers, largest * width),
            PlannedCollective("reduce_scatter", "fsdp", times, scattered * 4),
            *_replica_collectives(role, reduced * updates, scattered * 4),
            PlannedCollective("all_gather", "trainer", norm, metrics * 8),
        ]
        if adapter is not None and publishes:
            merge = "1 (the adapter, before its weights are published)"
            found.append(PlannedCollective("all_gather", "trainer", merge, adapter.parameters * 4))
        return found


def _gathers(role: TrainRole, model: ModelFacts, updates: int) -> tuple[str, str]:
    """How often parameters are gathered before training, and while training."""
    layers, units, adapter = model.layers, model.layers + 1, model.adapter
    # FSDP2 gathers one layer ahead of the next backward, even if there is none.
    backward = layers if adapter is None else layers - max(adapter.first_trained_layer - 1, 0)
    models = len(role.objective.evaluated_fields)
    # The policy without its adapter serves as the reference, unless the adapter was loaded with weights.
    held = models if adapter is None or adapter.reference_differs_from_base else min(models, 1)
    if role.trainer.reshard_after_forward:
        # A layer is gathered again for its backward; the root (embedding, last norm, head) is kept until then.
        before = f"{models * layers} per micro-batch, and {held}"
        gathers = f"{layers + backward + 1} per micro-batch"
    else:
        before = f"{held * units}"
        gathers = f"{units * updates} ({units} per optimizer step)"
    return f"{before} (log-probabilities before training)", gathers


def _replica_collectives(role: TrainRole, times: int, size: int) -> list[PlannedCollective]:
    """The collectives that HSDP adds: gradients are summed across replicas."""
    trainer = role.trainer
    if trainer.replicas == 1:
        return []
    return [PlannedCollective("all_reduce", "replicas", f"{times} (gradients, across copies)", size // trainer.shards)]
