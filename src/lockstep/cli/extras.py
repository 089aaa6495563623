"""Optional dependencies of commands: a missing extra is reported in one line before anything is imported."""

from importlib.util import find_spec

import typer

from lockstep.cli.terminal import REFUSED, show_refusal

_TRAIN = (
    "torch", "transformers", "datasets", "pyarrow", "safetensors", "tokenizers", "accelerate", "peft",
    "huggingface_hub", "httpx", "matplotlib", "tensorboard",
)  # fmt: skip
_MODULES = {"train": _TRAIN, "ray": (*_TRAIN, "ray")}
"""By extra, its modules."""


def require_extra(extra: str, command: str) -> None:
    """Exits with a hint to install an extra of the distribution if one of its modules is missing.

    Args:
        command: the command that needs it, as it is typed.
    """
    missing = next((name for name in _MODULES[extra] if find_spec(name) is None), None)
    if missing is not None:
        text = f"{command} needs {missing}, which is not installed: pip install 'lockstep-rl[{extra}]'"
        show_refusal(ModuleNotFoundError(text))
        raise typer.Exit(REFUSED)
