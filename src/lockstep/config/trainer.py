"""How weights are updated, sharded, checkpointed, and synced to the engines."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import FALSE_AS_OFF, Section


class CommunicationConfig(Section):
    fallback: Literal["none", "gloo"] = "none"
    """`gloo_choice` runs the trainer's collectives on gloo where NCCL cannot be brought up, with a warning and the
    measured cost; `none` ends the run with the finding."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class LRScheduleConfig(Section):
    """Linear warm-up, then constant, linear or cosine decay to `is_permanent` of the peak."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """In optimizer steps."""
    total_steps: int | None = Field(None, gt=0)
    """In optimizer steps; the run's length when absent."""
    final: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than total_steps {self.total_steps}")
        return self


class OffloadConfig(Section):
    """What moves to host memory while engines generate on the trainer's GPU, and back for training."""

    parameters: bool = False
    optimizer: bool = False

    @property
    def anything(self) -> bool:
        return self.parameters or self.optimizer


class TrainerConfig(Section):
    ranks: int = Field(1, gt=0)
    """Data-parallel ranks; parameters are sharded over them with FSDP2."""
    replicas: int = Field(1, gt=0)
    """Copies of the sharded parameters (HSDP), each on `ranks / replicas` neighbouring ranks: gathers stay within a
    copy, such as a host, and only gradients cross."""
    threads: int | None = Field(None, gt=0)
    """Torch threads of a rank; the cores are shared out evenly when absent."""
    reshard_after_forward: bool = True
    """True frees gathered layers after forward (ZeRO-3), False keeps them until backward (ZeRO-2)."""
    activation_checkpointing: bool = False
    optimizer: AdamWConfig = AdamWConfig()
    schedule: LRScheduleConfig = LRScheduleConfig()
    max_grad_norm: float | None = Field(1.0, gt=0)
    head_chunk: int = Field(1024, gt=0)
    """Target positions per chunk of the head and loss: `[chunk, vocabulary]` is the largest logits tensor."""
    compile: Annotated[Literal["off", "layers"], FALSE_AS_OFF] = "off"
    """`layers` compiles the decoder layers with torch.compile (a C++ compiler is needed on the CPU): some CPU seconds
    once per rank, then faster steps."""
    malloc: Literal["tuned", "default"] = "tuned"
    """`tuned` lets the C library keep memory between steps instead of giving it back (glibc; the CPU's steps get
    faster, the process stays at its peak)."""
    offload: OffloadConfig = OffloadConfig()
    collective_timeout_s: float = Field(1800.0, gt=0)
    """Bound of one collective, on every communicator."""

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the parameters is sharded."""
        return self.ranks // self.replicas

    @model_validator(mode="after")
    def _replicas_fit(self) -> Self:
        if self.replicas > 1 and (self.ranks % self.replicas or self.shards < 2):
            raise ValueError(
                f"replicas {self.replicas} must divide ranks {self.ranks}, and leave two at least to shard a copy over"
            )
        return self


class CheckpointConfig(Section):
    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 keeps only the last step's."""
    keep_last: int = Field(2, ge=2)
    """Two at least: step files are kept until the second newest checkpoint."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluation as well."""
    export: bool | Literal["merged", "adapter"] = True
    """Write `export_handle`, a folder that `AutoModelForCausalLM.from_pretrained` loads, when the run ends; with an
    adapter (merged there) also `adapter`, which `PeftModel.from_pretrained` loads. Or only one of the two."""


class WeightSyncConfig(Section):
    """Engines on the trainer's node read from its shared memory. What brings weights to others is chosen by
    `transport`."""

    transport: Literal["auto", "nccl", "cuda_ipc", "shared", "gloo", "files"] = "auto"
    """Between GPUs `nccl_choice`, or `cuda_ipc` where engines and trainer share them; through host memory `shared` on
    one host, `gloo_choice` between hosts, `incident_files` in a folder that all hosts see. `auto` takes the fastest
    that reaches all engines, and says which."""
    delta: bool = False
    """Send only the buckets that have changed since the version that the engines have."""
    bucket_mb: float = Field(64.0, gt=0)
    """Bytes that are gathered, sent and checked at once, in MiB."""
    check: Literal["sampled", "complete"] = "sampled"
    """Checksums over samples of every bucket, or over all bytes."""
    receiver_limit_s: float = Field(60.0, gt=0)
    """A node for which nothing moves for this long is left behind, and brought up to date beside the run; a reader that
    keeps memory for this long that a version needs is ended. The trainer does not wait longer."""
    folder: str | None = None
    """For `incident_files`: a folder that the trainer's and all engines' hosts see; the run makes one of its own in
    it. In the run's folder when absent."""
