"""Errors of a trainer that the controller handles by their code. Imports no torch."""

from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be used."""

    error_code = "checkpoint_unusable"

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
        self.folder, self.reason = folder, reason


class SharedMemoryFull(RuntimeError):
    """Shared memory has no room for two copies of a rank's state. `needed` and `available` are bytes."""

    error_code = "no_room_for_copy"

    def __init__(self, folder: Path, needed: int, available: int) -> None:
        super().__init__(
            f"{folder}: two copies of the trainer's state need {needed} bytes of shared memory for this rank, "
            f"{available} are free; enlarge it (docker run --shm-size) or set recovery.memory_copy=false"
        )
        self.folder, self.needed, self.available = folder, needed, available


class MemoryCheckpointMissing(RuntimeError):
    """There is no complete copy of that version, or it has other tensors."""

    error_code = "no_copy"

    def __init__(self, folder: Path, rank: int, version: int, why: str) -> None:
        super().__init__(f"{folder}: no copy of version {version} of rank {rank}'s state: {why}")
        self.folder, self.rank, self.version = folder, rank, version


class TrainerUnsupported(ValueError):
    """A kind of trainer lacks what a setting asks for. Raised before anything starts, by its planner or by the plan of
    the run, and by a method that the kind does not implement.

    Attributes:
        kind: the value of `trainer.kind`.
        setting: the setting that asks for it, such as `model.adapter`.
        remedy: what to do instead.
    """

    error_code = "trainer_unsupported"

    def __init__(self, kind: str, setting: str, remedy: str) -> None:
        super().__init__(f"trainer.kind {kind} does not support {setting}; {remedy}")
        self.kind, self.setting, self.remedy = kind, setting, remedy


class NonFinite(ArithmeticError):
    """The loss or a gradient is infinite or NaN. The step changed neither weights nor optimizer.

    Attributes:
        step: optimizer step, from 1.
        what: `loss` or `gradient`.
        places: for a loss, each affected rank and its first affected micro-batch. For a gradient, the ranks whose rows
            are affected; their micro-batch is None, because gradients are checked after they were summed.
    """

    def __init__(self, step: int, what: str, places: list[tuple[int, int | None]]) -> None:
        where = ", ".join(f"rank {rank}" + ("" if m is None else f" micro-batch {m}") for rank, m in places[:8])
        super().__init__(
            f"{what} of optimizer step {step} is not finite ({where}); no weight was changed. Look at the samples of "
            "that micro-batch, or try a lower trainer.optimizer.lr or more warm-up steps"
        )
        self.step, self.what, self.places = step, what, places
