"""Names, folders, checkpoints and trackers from verl's section `trainer`."""

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion

_TRACKERS = {"wandb": "project", "mlflow": "experiment"}
"""Trackers of both, and the field with the name of verl's project."""
_ALWAYS = ("console", "tensorboard", "file")


def set_verl_tracking(conv: Conversion, kept: str) -> None:
    """Sets name, folder, kept checkpoints and trackers.

    Args:
        kept: the option with the number of checkpoints that are kept.
    """
    conv.put("name", _name(conv.text("trainer.experiment_name") or "verl"), "trainer.experiment_name", keep=True)
    if conv.has("trainer.default_local_dir"):
        path = (conv.text("trainer.default_local_dir") or "").rstrip("/")
        conv.put("folder", path or "runs", "trainer.default_local_dir")
    fields.set_kept(conv, kept)
    loggers = conv.items("trainer.logger")
    project = conv.text("trainer.project_name")
    trackers = [{"kind": each, _TRACKERS[each]: project} for each in loggers if each in _TRACKERS]
    if trackers:
        conv.put("tracking", trackers, "trainer.logger", "trainer.project_name", keep=True)
    conv.drop("trainer.project_name", "no tracker needs it")
    others = [each for each in loggers if each not in (*_TRACKERS, *_ALWAYS)]
    if others:
        conv.refuse("trainer.logger", f"there is no tracker {', '.join(others)[:60]}")
    conv.drop("trainer.logger", "console, TensorBoard and JSON lines are always there")


def _name(text: str) -> str:
    kept = "".join(each if (each.isalnum() and each.isascii()) or each in "._-" else "-" for each in text)
    return kept.strip("-._") or "verl"
