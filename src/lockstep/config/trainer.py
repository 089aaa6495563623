"""How weights are updated, sharded and kept."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.base import OFF_IS_A_WORD, Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Section):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class Schedule(Section):
    """Linear warm-up, then constant, linear or cosine decay to `final` of the peak."""

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


class Offload(Section):
    """What moves to host memory while engines generate on the trainer's GPU, and back for training."""

    parameters: bool = False
    optimizer: bool = False

    @property
    def anything(self) -> bool:
        return self.parameters or self.optimizer


class Trainer(Section):
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
    optimizer: AdamW = AdamW()
    schedule: Schedule = Schedule()
    max_grad_norm: float | None = Field(1.0, gt=0)
    head_chunk: int = Field(1024, gt=0)
    """Target positions per chunk of the head and loss: `[chunk, vocabulary]` is the largest logits tensor."""
    compile: Annotated[Literal["off", "layers"], OFF_IS_A_WORD] = "off"
    """`layers` compiles the decoder layers with torch.compile (a C++ compiler is needed on the CPU): some CPU seconds
    once per rank, then faster steps."""
    malloc: Literal["tuned", "default"] = "tuned"
    """`tuned` lets the C library keep memory between steps instead of giving it back (glibc; the CPU's steps get
    faster, the process stays at its peak)."""
    offload: Offload = Offload()
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


class Checkpoint(Section):
    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 keeps only the last step's."""
    keep_last: int = Field(2, ge=2)
    """Two at least: step files are kept until the second newest checkpoint."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluation as well."""
    export: bool | Literal["merged", "adapter"] = True
    """Write `export`, a folder that `AutoModelForCausalLM.from_pretrained` loads, when the run ends; with an adapter
    (merged there) also `adapter`, which `PeftModel.from_pretrained` loads. Or only one of the two."""
