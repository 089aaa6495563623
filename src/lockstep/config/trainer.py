"""How weights are updated, sharded, checkpointed, and synced to the engines."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.base.json_text import read_json
from lockstep.config.section import FALSE_AS_OFF, Section


class CommunicationConfig(Section):
    fallback: Literal["none", "gloo"] = "none"
    """`gloo` runs the trainer's collectives on gloo if NCCL does not work, with a warning and the measured cost; `none`
    ends the run with the finding."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class LRScheduleConfig(Section):
    """Linear warm-up, then constant, linear or cosine decay to `final` times the peak."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """In optimizer steps."""
    total_steps: int | None = Field(None, gt=0)
    """In optimizer steps; the run's length when absent."""
    final: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than total_steps {self.total_steps}")
        return self


class OffloadConfig(Section):
    """State that moves to host memory while engines generate, or while another role computes on the same devices
    (`placement.colocate`), and back before the role computes. When absent: both, if the role shares its devices, else
    nothing; quantized parameters stay."""

    parameters: bool | None = None
    optimizer: bool | None = None

    @property
    def anything(self) -> bool:
        return bool(self.parameters or self.optimizer)

    def resolved(self, shared: bool, movable: bool) -> "OffloadConfig":
        """The config without absent values.

        Args:
            shared: whether the role shares its devices.
            movable: whether its parameters can leave the device.
        """
        parameters, optimizer = self.parameters, self.optimizer
        return OffloadConfig(
            parameters=shared and movable if parameters is None else parameters,
            optimizer=shared if optimizer is None else optimizer,
        )


class StepRange(Section):
    first_step: int = Field(gt=0)
    """Counted from 1, as on the console."""
    last_step: int = Field(gt=0)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.last_step < self.first_step:
            raise ValueError(
                f"last_step {self.last_step} is before first_step {self.first_step}; give a later one, or the same"
            )
        return self


class ProfileConfig(StepRange):
    """Optimizer steps that torch.profiler records: `profiles/ROLE-rankR-steps-A-B.json.gz` in the run's folder, which
    Perfetto opens. These steps take longer, and the step before the first one warms the profiler up."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    memory: bool = False
    """Also records allocations."""
    stacks: bool = False
    """Also records the Python lines of operations."""


TRAINER_KINDS = ["fsdp2", "deepspeed"]
"""The names of the kinds of trainers. `lockstep.train.trainer_kinds.TRAINERS` has their implementations."""


def read_deepspeed_file(name: str) -> Any:
    """Returns the content of a DeepSpeed JSON file. Raises ValueError if it cannot be read, or is not JSON."""
    path = Path(name).expanduser()
    try:
        return read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; give the path of a JSON file") from error


class TrainerConfig(Section):
    kind: str = "fsdp2"
    """How the model is trained on several ranks: `fsdp2` shards parameters, gradients and optimizer state; `deepspeed`
    shards what its stage says (docs/deepspeed.md)."""
    deepspeed: dict[str, Any] | None = None
    """For `deepspeed`: settings of a DeepSpeed JSON file, or the file's path. `auto` values are filled from the run's
    config, and others must agree with it. Stage 2 when absent."""
    ranks: int = Field(1, gt=0)
    """Data-parallel ranks, over which parameters are sharded."""
    replicas: int = Field(1, gt=0)
    """Copies of the sharded parameters (HSDP), each on `ranks / replicas` neighbouring ranks: all-gathers stay within a
    copy, such as a host, and only gradients cross."""
    rank_speeds: Literal["equal", "measured"] | tuple[Annotated[float, Field(gt=0)], ...] = "equal"
    """How the work of a step is divided among ranks: `equal`; `measured`, by the speeds of the last steps, which the
    ledger stores so that a resumed run divides alike; or by these numbers, one per rank (docs/communication.md). The
    objective and its gradient are the same."""
    threads: int | None = Field(None, gt=0)
    """Torch threads per rank; an even share of the cores when absent."""
    reshard_after_forward: bool = True
    """True frees gathered layers after forward (ZeRO-3), false keeps them until backward (ZeRO-2)."""
    activation_checkpointing: bool = False
    optimizer: AdamWConfig = AdamWConfig()
    schedule: LRScheduleConfig = LRScheduleConfig()
    max_grad_norm: float | None = Field(1.0, gt=0)
    head_chunk: int = Field(1024, gt=0)
    """Target positions per chunk of the head and loss: `[chunk, vocabulary]` is the largest logits tensor."""
    compile: Annotated[Literal["off", "layers", "auto"], FALSE_AS_OFF] = "off"
    """`layers` compiles the decoder layers with torch.compile (needs a C++ compiler on the CPU): some CPU seconds once
    per rank, then faster steps. `auto` does so where the run is long enough for it to pay."""
    malloc: Literal["tuned", "default"] = "tuned"
    """`tuned` lets the C library keep freed memory between steps (glibc; faster steps on the CPU, while the process
    stays at its peak memory)."""
    offload: OffloadConfig = OffloadConfig()
    collective_timeout_s: float = Field(1800.0, gt=0)
    """Timeout of one collective, on every communicator."""
    profile: ProfileConfig | None = None

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the parameters is sharded."""
        return self.ranks // self.replicas

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in TRAINER_KINDS:
            raise ValueError(f"unknown kind of trainer, expected {' or '.join(TRAINER_KINDS)}")
        return kind

    @field_validator("deepspeed", mode="before")
    @classmethod
    def _read_deepspeed(cls, value: Any) -> Any:
        """Reads the settings' file, so that ranks on other hosts need not see it."""
        return read_deepspeed_file(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        if self.profile is not None and max(self.profile.ranks) >= self.ranks:
            raise ValueError(f"profile.ranks has {max(self.profile.ranks)}, expected ranks from 0 to {self.ranks - 1}")
        return self

    @model_validator(mode="after")
    def _check_rank_speeds(self) -> Self:
        if not isinstance(self.rank_speeds, str) and len(self.rank_speeds) != self.ranks:
            raise ValueError(
                f"rank_speeds has {len(self.rank_speeds)} numbers, expected one for each of {self.ranks} ranks, equal "
                "or measured"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed(self) -> Self:
        if self.deepspeed is not None and self.kind != "deepspeed":
            raise ValueError(f"deepspeed has no effect with kind {self.kind}: set kind to deepspeed, or leave it out")
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.replicas > 1 and (self.ranks % self.replicas or self.shards < 2):
            raise ValueError(
                f"replicas {self.replicas} must divide ranks {self.ranks} and leave at least two ranks per copy"
            )
        return self


class CheckpointConfig(Section):
    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 writes only the last step's."""
    keep_last: int = Field(2, ge=2)
    """At least two: step files are kept until the second newest checkpoint."""
    keep_best: bool = True
    """Also keep the checkpoint of the best evaluation."""
    keep_rollouts_gb: float = Field(0.0, ge=0)
    """Keep the newest step files that no checkpoint needs any more, up to this size (10^9 bytes), for `lockstep
    samples`. Those that are needed to resume are kept whatever their size."""
    export: bool | Literal["merged", "adapter"] = True
    """When the run ends, write `export`, a folder for `AutoModelForCausalLM.from_pretrained` or, of a reward model,
    `AutoModelForSequenceClassification.from_pretrained` (an adapter is merged into it), and with an adapter also
    `adapter`, for `PeftModel.from_pretrained`. Or only one of the two."""


class WeightSyncConfig(Section):
    """Engines on the trainer's node read weights from its shared memory. `transport` brings them to other engines."""

    transport: Literal["auto", "nccl", "cuda_ipc", "shared", "gloo", "files"] = "auto"
    """Between GPUs `nccl`, or `cuda_ipc` where engines and trainer share GPUs; through host memory `shared` on one
    host, `gloo` between hosts, `files` in a folder that all hosts see. `auto` uses the fastest one that reaches all
    engines, and logs which."""
    delta: bool = False
    """Send only the buckets that differ from the engines' version."""
    bucket_mb: float = Field(64.0, gt=0)
    """Size of a bucket, the unit of gathering, sending and checking, in MiB."""
    check: Literal["sampled", "complete"] = "sampled"
    """Checksums over samples of every bucket, or over all bytes."""
    receiver_limit_s: float = Field(60.0, gt=0)
    """How long the trainer waits without progress: a node that makes none is left behind and catches up later; a reader
    that holds memory that a new version needs is killed."""
    folder: str | None = None
    """For `files`: a folder that the hosts of the trainer and of all engines see; the run creates its own in it. In the
    run's folder when absent."""
