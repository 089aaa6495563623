"""What a GPU must hold at least, and whether it can.

Weights, gradients and Adam's states in mixed precision: 2 + 2 + 12 bytes per parameter, divided by ZeRO as its paper
has it (Rajbhandari et al. 2020, arXiv:1910.02054, section 3 and figure 1). Activations kept by full recomputation: 2
bytes x tokens x hidden x layers (Korthikanti et al. 2022, arXiv:2205.05198, section 5). Logits: tokens x vocabulary
in bfloat16, and their gradient. An engine: its weights and its cache within its share of the GPU. All are lower bounds.
"""

from dataclasses import dataclass

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.models import Shape
from lockstep.doctor.configs.settings import NOWHERE, Place
from lockstep.doctor.finding import Severity

GIB = 1 << 30
SOLD = (24, 40, 48, 80, 96, 141, 192, 288)
"""GiB of GPUs that are sold, nearly."""
ZERO = "https://arxiv.org/abs/1910.02054"
ACTIVATIONS = "https://arxiv.org/abs/2205.05198"
UTILIZATION = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"


@dataclass(frozen=True, slots=True)
class Training:
    """How the states of a trained model are kept."""

    shape: Shape
    ranks: int | None
    """Over which states are divided."""
    stage: int = 3
    optimizer_on_cpu: bool = False
    parameters_on_cpu: bool = False
    trainable: float = 1.0
    """Share of the parameters that is trained: small with an adapter."""
    weight_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12

    def state_bytes(self) -> float | None:
        """On each GPU while training; None where the number of ranks is not known and matters."""
        ranks = self.ranks
        if ranks is None and self.stage > 0:
            return None
        share = 1 / (ranks or 1)
        weights = 0.0 if self.parameters_on_cpu else self.weight_bytes * (share if self.stage == 3 else 1.0)
        gradients = self.gradient_bytes * self.trainable * (share if self.stage >= 2 else 1.0)
        optimizer = (
            0.0
            if self.optimizer_on_cpu
            else self.optimizer_bytes * self.trainable * (share if self.stage >= 1 else 1.0)
        )
        return self.shape.parameters * (weights + gradients + optimizer)


@dataclass(frozen=True, slots=True)
class Engine:
    """A generation engine's share of its GPUs."""

    shape: Shape
    tensor_parallel: int
    utilization: float
    shares_gpus: bool = False
    """With the trainer."""
    sleeps: bool = False
    """Gives its memory back while the trainer works."""
    longest: int | None = None
    """Tokens of a prompt with its completion."""
    place: Place = NOWHERE
    option: str = "gpu_memory_utilization"

    def weight_bytes(self) -> float:
        """On each of its GPUs."""
        return 2 * self.shape.parameters / self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward and backward of a GPU goes over."""

    tokens: int | None
    fused_head: bool = False
    """Logits are never whole in memory: fused or chunked cross-entropy."""


def gib(value: float) -> str:
    """Bytes as people read them."""
    return f"{value / GIB:.3g} GiB"


def activation_bytes(shape: Shape, batch: Batch) -> float:
    """At least, 0 where nothing tells."""
    if batch.tokens is None:
        return 0.0
    return 2 * batch.tokens * shape.hidden * shape.layers


def logit_bytes(shape: Shape, batch: Batch) -> float:
    """Logits and their gradient in bfloat16, where they are whole in memory."""
    return 4 * batch.tokens * shape.vocabulary if batch.tokens is not None and not batch.fused_head else 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one GPU while training."""

    state: float
    kept: float
    """Activations."""
    logits: float

    @property
    def certain(self) -> float:
        """What cannot be avoided."""
        return self.state + self.kept

    @property
    def likely(self) -> float:
        """With logits."""
        return self.certain + self.logits


def judge(
    advice: Advice,
    training: Training | None,
    engine: Engine | None,
    batch: Batch,
    gpu_gib: float | None,
    at: Place,
    offloaded_while_generating: bool = False,
    what: str = "training",
) -> None:
    """Whether states, activations and engine fit a GPU of `gpu_gib`; without it, which GPUs are large enough."""
    state = training.state_bytes() if training is not None else None
    need = None
    if training is not None and state is not None:
        need = Need(state, activation_bytes(training.shape, batch), logit_bytes(training.shape, batch))
        _training(advice, training, need, batch, gpu_gib, at, what)
    elif training is not None:
        advice.unchecked("memory-training", "memory of training: how many ranks share its states is not told here")
    if engine is not None:
        _engine(advice, engine, gpu_gib)
        if engine.shares_gpus and need is not None:
            _together(advice, engine, need, gpu_gib, offloaded_while_generating)


def _seen(training: Training, need: Need, batch: Batch, what: str) -> str:
    shape = training.shape
    parts = f"{gib(need.state)} of weights, gradients and optimizer"
    if need.kept:
        parts += f", {gib(need.kept)} of activations"
    if need.logits:
        parts += f", {gib(need.logits)} of logits" + (f" for {batch.tokens:,} tokens" if batch.tokens else "")
    ways = f"ZeRO stage {training.stage}" if training.stage else "no division of states"
    ways += f" over {training.ranks} ranks" if training.ranks else ""
    ways += ", the optimizer on the host" if training.optimizer_on_cpu else ""
    return f"{what} of {shape.name} ({shape.size}) needs at least {gib(need.likely)} on each GPU: {parts}; {ways}"


def _training(
    advice: Advice, training: Training, need: Need, batch: Batch, gpu_gib: float | None, at: Place, what: str
) -> None:
    seen, fix = _seen(training, need, batch, what), _smaller(training, need)
    open_end = not training.shape.layers or batch.tokens is None
    if open_end:
        unknown = "the model's shape" if not training.shape.layers else "how many tokens a micro-batch has"
        seen += f", and more for activations and logits ({unknown} is not known here)"
    room = gpu_gib if gpu_gib is not None else SOLD[-1]
    if need.certain > room * GIB:
        has = f"a GPU has {gpu_gib:g} GiB" if gpu_gib is not None else "no GPU has that much"
        advice.error("memory-training", f"{seen}; {has}", "The run ends in CUDA out of memory.", fix, ZERO, at)
    elif gpu_gib is None:
        enough = next(size for size in SOLD if need.likely <= size * GIB * 0.92 or size == SOLD[-1])
        say = advice.warn if enough > 80 else advice.note
        room_is = f"GPUs below {enough} GiB have no room" if open_end else f"GPUs from {enough} GiB have room"
        say("memory-training", f"{seen}; {room_is}", "", fix if enough > 80 else "", ZERO, at)
    elif need.likely > 0.92 * gpu_gib * GIB:
        tight = f"{seen}, of {gpu_gib:g} GiB: buffers and fragments do not fit beside it"
        advice.warn("memory-training", tight, "", fix, ZERO, at)
    else:
        severity: Severity = "note" if open_end else "ok"
        advice.say("memory-training", severity, f"{seen}, of {gpu_gib:g} GiB", source=ZERO, at=at)


def _smaller(training: Training, need: Need) -> str:
    ways = []
    if training.stage < 3:
        ways.append("ZeRO stage 3 (or FSDP full shard)")
    if not training.optimizer_on_cpu:
        ways.append("the optimizer on the host (adam_offload, offload_optimizer, optimizer_offload)")
    if need.kept + need.logits > need.state:
        ways.insert(0, "fewer tokens per micro-batch")
    ways.append("more GPUs" if training.stage else "dividing states over ranks")
    return ", or ".join(ways)


def _engine(advice: Advice, engine: Engine, gpu_gib: float | None) -> None:
    shape, weights = engine.shape, engine.weight_bytes()
    rooms = (gpu_gib,) if gpu_gib is not None else SOLD
    fitting = [room for room in rooms if weights < room * GIB * engine.utilization]
    seen = (
        f"the engine's weights ({shape.name}, {shape.size}, tensor parallel {engine.tensor_parallel}) are"
        f" {gib(weights)} on each GPU, {engine.option} {engine.utilization:g} of it is all that the engine may take"
    )
    if not fitting:
        advice.error(
            "memory-engine",
            seen + (f": {gib(gpu_gib * GIB * engine.utilization)}" if gpu_gib else ""),
            "vLLM ends at its start: no memory is left for the cache.",
            f"a larger tensor parallel size, or a larger {engine.option}",
            UTILIZATION,
            engine.place,
        )
        return
    if gpu_gib is None and fitting[0] > 80:
        advice.warn(
            "memory-engine",
            f"{seen}: GPUs from {fitting[0]} GiB have room",
            "",
            "a larger tensor parallel size",
            UTILIZATION,
            engine.place,
        )
    if gpu_gib is not None and engine.longest and shape.layers:
        left = gpu_gib * GIB * engine.utilization - weights
        one = shape.cache_bytes() / max(1, min(engine.tensor_parallel, shape.kv_heads)) * engine.longest
        if one > left:
            advice.error(
                "memory-cache",
                f"the cache of one sequence of {engine.longest:,} tokens is {gib(one)}, {gib(left)} are left beside the"
                " weights",
                "vLLM refuses to start when its longest sequence does not fit.",
                f"a larger {engine.option} or tensor parallel size, or shorter sequences",
                UTILIZATION,
                engine.place,
            )


def _together(advice: Advice, engine: Engine, need: Need, gpu_gib: float | None, offloaded: bool) -> None:
    if not engine.sleeps:
        room = gpu_gib if gpu_gib is not None else 80
        if engine.utilization * room * GIB + need.certain > room * GIB:
            seen = (
                f"the engine keeps {engine.utilization:.0%} of each GPU while training needs {gib(need.certain)} of the"
                " same GPU" + ("" if gpu_gib is not None else ": together more than 80 GiB")
            )
            say = advice.error if gpu_gib is not None or engine.utilization > 0.85 else advice.warn
            say(
                "memory-together",
                seen,
                "Engine and trainer share GPUs, and the engine does not sleep.",
                f"let the engine sleep while training, or a smaller {engine.option}",
                UTILIZATION,
                engine.place,
            )
    elif not offloaded and gpu_gib is not None and engine.utilization * gpu_gib * GIB + need.state > gpu_gib * GIB:
        advice.warn(
            "memory-together",
            f"the trainer's states ({gib(need.state)}) stay on the GPU while the engine wakes to"
            f" {engine.utilization:.0%} of it",
            "The engine's share is of the whole GPU; what others hold is not subtracted once it sleeps and wakes.",
            f"offload the trainer while engines generate, or a smaller {engine.option}",
            UTILIZATION,
            engine.place,
        )
