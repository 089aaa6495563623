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
    """A node for which nothing moves for this long is left behind, and brought up to date beside the run; a reader that
    keeps memory for this long that a version needs is ended. The trainer does not wait longer."""
    folder: str | None = None
    """For `files`: a folder that the trainer's and all engines' hosts see; the run makes one of its own in it. In the
    run's folder when absent."""
