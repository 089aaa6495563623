"""How weights get from the trainer to the engines."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section


class WeightSync(Section):
    """Engines on the trainer's node read from its shared memory. What brings weights to others is chosen by
    `transport`."""

    transport: Literal["auto", "nccl", "cuda_ipc", "shared", "gloo", "files"] = "auto"
    """Between GPUs `nccl`, or `cuda_ipc` where engines and trainer share them; through host memory `shared` on one
    host, `gloo` between hosts, `files` in a folder that all hosts see. `auto` takes the fastest that reaches all
    engines, and says which."""
    delta: bool = False
    """Send only the buckets that have changed since the version that the engines have."""
    bucket_mb: float = Field(64.0, gt=0)
    """Bytes that are gathered, sent and checked at once, in MiB."""
    check: Literal["sampled", "complete"] = "sampled"
    """Checksums over samples of every bucket, or over all bytes."""
    receiver_limit_s: float = Field(60.0, gt=0)
    """A receiver without progress for this long is left behind, and brought up to date when it is back: the trainer
    does not wait for it longer."""
    folder: str | None = None
    """For `files`: a folder that the trainer's and all engines' hosts see. In the run's folder when absent."""
