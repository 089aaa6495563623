"""Errors of a trainer that the controller decides by. Imports no torch."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or must not be read."""

    error_code = "checkpoint_unusable"

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
        self.folder, self.reason = folder, reason


class SharedMemoryFull(RuntimeError):
    """Shared memory has no room for two copies of a rank's state; bytes."""

    error_code = "no_room_for_copy"

    def __init__(self, folder: Path, needed: int, available: int) -> None:
        super().__init__(
            f"{folder}: two copies of the trainer's state need {needed} bytes of shared memory for this rank, "
            f"{available} are free; enlarge it (docker run --shm-size) or set recovery.memory_copy=false"
        )
        self.folder, self.needed, self.available = folder, needed, available


class MemoryCheckpointMissing(RuntimeError):
    """There is no whole copy of that version, or it is of other tensors."""

    error_code = "no_copy"

    def __init__(self, folder: Path, rank: int, version: int, why: str) -> None:
        super().__init__(f"{folder}: no copy of version {version} of rank {rank}'s state: {why}")
        self.folder, self.rank, self.version = folder, rank, version


class NonFinite(ArithmeticError):
    """The loss or a gradient is infinite or NaN; the weights and the optimizer are as before the step.

    Attributes:
        step: optimizer step, from 0.
        what: `loss` or `gradient`.
        places: (rank, micro-batch) of each first bad loss; for gradients the ranks that hold bad rows, with
            micro-batch None, as gradients of a step's micro-batches are summed before they are looked at.
    """

    def __init__(self, step: int, what: str, places: list[tuple[int, int | None]]) -> None:
        where = ", ".join(f"rank {rank}" + ("" if m is None else f" micro-batch {m}") for rank, m in places[:8])
        super().__init__(
            f"{what} of optimizer step {step} is not finite ({where}); no weight was changed. Look at the samples of "
            "that micro-batch, a lower trainer.optimizer.lr, or more warm-up"
        )
        self.step, self.what, self.places = step, what, places
