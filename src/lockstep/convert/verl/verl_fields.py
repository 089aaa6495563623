"""Fields that the options of all of verl's trainers lead to: model, rows, steps, shards, names, trackers."""

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion

_TRACKERS = {"wandb": "project", "mlflow": "experiment"}
"""Trackers of both, and the field with the name of verl's project."""
_ALWAYS = ("console", "tensorboard", "file")
_PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
_LIMIT, _STEPS, _EPOCHS = "data.train_max_samples", "trainer.total_training_steps", "trainer.total_epochs"


def set_verl_model(conv: Conversion, section: str, dtype: str) -> None:
    """Sets path, adapter and precision of the model.

    Args:
        section: that of the model, with its adapter.
        dtype: the option with its precision.
    """
    fields.set_model_path(conv, f"{section}.path")
    others = {key: f"{section}.{key}" for key in ("lora_alpha", "target_modules")}
    others["path"] = f"{section}.lora_adapter_path"
    fields.set_adapter(conv, f"{section}.lora_rank", others, f"{section}.lora.dropout", exact=False)
    if conv.has(dtype):
        conv.put("model.dtype", _PRECISIONS.get(conv.text(dtype) or "", "float32"), dtype)


def set_verl_limit(conv: Conversion) -> None:
    """Sets the number of rows that are used."""
    limit = conv.integer(_LIMIT)
    if limit is not None and limit > 0:
        conv.put("data.limit", limit, _LIMIT)
    conv.drop(_LIMIT, "all rows are used")


def set_verl_steps(conv: Conversion, batch: int, epochs: int) -> tuple[int, int | None]:
    """Sets `steps`; returns them, and the steps of an epoch if they are known.

    Args:
        batch: rows per step.
        epochs: their number if no option says it.
    """
    rows, limit, total = conv.facts.rows, conv.integer(_LIMIT) or -1, conv.integer(_STEPS)
    rows = min(rows, limit) if rows is not None and limit > 0 else rows
    per_epoch = None if rows is None else max(1, rows // batch)
    if total:
        conv.put("steps", total, _STEPS, keep=True)
        conv.drop(_EPOCHS, f"{_STEPS} takes its place")
        return total, per_epoch
    count = conv.count(_EPOCHS, epochs)
    return fields.set_steps(conv, None if per_epoch is None else per_epoch * count, _EPOCHS), per_epoch


def set_verl_replicas(conv: Conversion, ranks: int, name: str) -> None:
    """Sets `trainer.replicas` from the number of ranks among which parameters are sharded."""
    size = conv.integer(name) or -1
    if 0 < size < ranks and ranks % size == 0:
        conv.put("trainer.replicas", ranks // size, name)
    conv.drop(name, "parameters are sharded over all ranks")


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
