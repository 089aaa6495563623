"""The config and the weights of the model that a user names; see `model_target`."""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.base.text import count_noun
from lockstep.config.algorithm import CrossEntropy
from lockstep.config.loader import apply_overrides, check_config, load_config
from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.ledger.ledger import Ledger
from lockstep.models.adapter_folder import resolve_adapter
from lockstep.models.errors import ModelError
from lockstep.models.model_loader import load_model_config
from lockstep.models.score_model import is_reward_model
from lockstep.run.errors import RunRefused
from lockstep.run.planning.working_folder import in_working_folder
from lockstep.run.trained_models.checkpoint_export import export_checkpoint, export_from_one_rank
from lockstep.run.trained_models.model_target import ADAPTER_CONFIG_FILE, ModelTarget


@contextmanager
def target_config(target: ModelTarget, file: Path | None, overrides: Sequence[str] = ()) -> Iterator[RunConfig]:
    """Yields the config to generate with: that of a file, or of the run that the model belongs to, or a plain one.
    Inside, the current folder is the one that its relative paths refer to.

    Raises:
        LedgerError, ConfigError: the config cannot be read, or an override is not valid.
    """
    if file is not None:
        yield load_config(file, overrides)
    elif target.run is None:
        recipe = "reward" if _is_reward_model(target) else "sft"
        plain = {"name": "model", "steps": 1, "model": {"path": target.path}, "data": {"path": "none"}}
        yield check_config(apply_overrides({"recipe": recipe, **plain}, overrides), source=target.name)
    else:
        with Ledger.reader(target.run) as ledger:
            config = check_config(apply_overrides(ledger.config(), overrides), source=str(target.run))
        with in_working_folder(target.run):
            yield config


def load_target(target: ModelTarget, config: RunConfig, scratch: Path) -> tuple[ModelConfig, int]:
    """Returns the model to load, in a form that every engine reads, and its number of steps, 0 if that is unknown. A
    checkpoint and an adapter are written to `scratch` as a whole model.

    Raises:
        RunRefused, LedgerError, ConfigError, ModelError, CheckpointError: there is no such model, or it cannot be read.
    """
    as_stored = {"revision": None, "tokenizer": None, "chat_template": None, "adapter": None, "quantization": None}
    copied = config.model.model_copy(update={**as_stored, "path": str(scratch / "model")})
    if target.run is not None and target.step is not None:
        with in_working_folder(target.run) as run:
            done = export_checkpoint(run, scratch / "model", target.step)
        _free_memory()
        return copied, done
    if not target.adapter:
        return copied.model_copy(update={"path": target.path}), 0
    adapter = resolve_adapter(AdapterConfig(path=target.path))
    base = copied.model_copy(update={"path": _base_of(target.path), "adapter": adapter})
    role = TrainRole(
        name="policy", model=base, trainer=TrainerConfig(), objective=CrossEntropy(), optimizer_steps=1
    )  # fmt: skip
    export_from_one_rank(role, scratch / "model", None)
    _free_memory()
    return copied, 0


def model_label(target: ModelTarget, steps: int) -> str:
    """How a model is called in results: as the user gave it, and after how many steps if that is known."""
    return f"{target.name} after {count_noun(steps, 'step')}" if steps else target.name


def _is_reward_model(target: ModelTarget) -> bool:
    """Whether the model, or an adapter, says of itself that it gives scores. False if it cannot be read, which is
    reported where it is loaded."""
    if target.adapter:
        content = (Path(target.path) / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8")
        return bool(json.loads(content).get("task_type") == "SEQ_CLS")
    try:
        return is_reward_model(load_model_config(ModelConfig(path=target.path)))
    except ModelError:
        return False


def _free_memory() -> None:
    """Frees the memory of a trainer of this process, for the engines."""
    gc.collect()
    torch.cuda.empty_cache()


def _base_of(adapter: str) -> str:
    """The model on which an adapter was trained. Raises RunRefused if its config does not say so."""
    content: dict[str, Any] = json.loads((Path(adapter) / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    base = content.get("base_model_name_or_path")
    if not base:
        raise RunRefused(
            f"{adapter}/{ADAPTER_CONFIG_FILE} has no base_model_name_or_path: write the model's name there"
        )
    return str(base)
