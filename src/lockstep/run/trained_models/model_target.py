"""What a user means by the name of a model: a run, a checkpoint, an adapter, a folder of Hugging Face, or one on the
hub. Imports no torch, so that what is not there is refused at once."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.run.errors import RunRefused

ADAPTER_CONFIG_FILE = "adapter_config.json"
SCRATCH_PREFIX = "lockstep-model-"
"""How the names of temporary folders for the copy of a model begin."""


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """What a path or name stands for."""

    name: str
    """As the user gave it."""
    path: str
    """Its absolute path, or the name of a model on the hub."""
    run: Path | None = None
    """The run that it is, or belongs to; its folder exists."""
    step: str | None = None
    """The checkpoint of the run: `last`, `best` or a number of steps; None if it is a folder with a model."""
    adapter: bool = False
    """Whether it is the folder of an adapter."""


def find_target(name: str, step: str | None) -> ModelTarget:
    """Finds out what the user means.

    Args:
        step: the checkpoint of a run; the newest when absent.

    Raises:
        RunRefused: a step is given for something that is not a run.
    """
    path = Path(name).expanduser().absolute()
    place = str(path) if path.is_dir() else name
    if (path / INDEX_FILE).is_file():
        return ModelTarget(name, place, path, step or "last")
    run = next((parent for parent in path.parents if (parent / INDEX_FILE).is_file()), None)
    if step is not None:
        raise RunRefused(f"--step {step} takes the folder of a run, which {name} is not")
    inside = path.relative_to(run).parts if run is not None else ()
    if inside[:1] == ("checkpoints",) and len(inside) > 1 and inside[1].isdigit():
        return ModelTarget(name, place, run, str(int(inside[1])))
    return ModelTarget(name, place, run, None, (path / ADAPTER_CONFIG_FILE).is_file())
