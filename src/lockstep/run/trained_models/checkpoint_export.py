"""Exports the model of a checkpoint, without starting its run."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.config.algorithm import CrossEntropy
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.ledger.ledger import Ledger
from lockstep.run.errors import RunRefused
from lockstep.run.planning.parent_run import choose_checkpoint, older_steps, with_older_steps
from lockstep.run.planning.prepare import resolve_adapters
from lockstep.run.step_scores import score_statistics
from lockstep.train.checkpoints.checkpoint_retention import part_folder
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.train.rank_service import choose_device
from lockstep.train.trainer_kinds import trainer_kind


def export_checkpoint(run: Path, out: Path, step: str = "last", role: str | None = None, adapter: bool = False) -> int:
    """Writes the model of a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads, of a reward model
    `AutoModelForSequenceClassification`.

    Loads the checkpoint on one rank in this process, on a GPU if there is one. The run may be in progress, and any
    number of ranks may have written the checkpoint.

    Args:
        out: the folder to write; it must not exist.
        step: `last`, `best`, or a number of steps done.
        role: the trained model; the policy when absent.
        adapter: write the adapter alone, as a folder that peft's `PeftModel.from_pretrained` loads.

    Returns:
        The number of steps in the checkpoint.

    Raises:
        RunRefused: there is no such checkpoint, role or adapter, or the folder exists.
        LedgerError, ConfigError, ModelError, CheckpointError: the run, its model or the checkpoint cannot be read.
    """
    if out.exists():
        raise RunRefused(f"{out} exists: name a new folder")
    with Ledger.reader(run) as ledger:
        config = resolve_adapters(check_config(ledger.config(), source=str(run)))
        rows = ledger.checkpoints()
        chosen = choose_checkpoint(rows, step)
        added = score_statistics(ledger, chosen.step + 1) if config.head == "score" else {}
    exported = _role_on_one_rank(config, role)
    if adapter and exported.model.adapter is None:
        raise RunRefused(f"{exported.name} of {run} has no adapter: leave --adapter out")
    part = part_folder(chosen.path, exported.name, [each.name for each in config.train_roles])
    try:
        export_from_one_rank(exported, out, part, adapter, added)
    except CheckpointError as error:
        if error.folder != part:
            raise
        raise with_older_steps(error, older_steps(rows, chosen), "--step ") from error
    return chosen.step + 1


def export_from_one_rank(
    role: TrainRole,
    out: Path,
    checkpoint: Path | None,
    adapter: bool = False,
    added: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes a model, or its adapter, from one rank in this process, on a GPU if there is one.

    Args:
        role: a role with one rank.
        checkpoint: the state to write; the model as it is loaded, with its adapter, when absent.
        added: values to add to the model's config.
    """
    trainer = trainer_kind(role).create(role, ParallelContext(device=choose_device("auto", 0)), 1, None)
    try:
        if checkpoint is not None:
            trainer.load(checkpoint)
        if adapter:
            trainer.export_adapter(out)
        else:
            trainer.export(out, added)
    finally:
        trainer.close()


def _role_on_one_rank(config: RunConfig, name: str | None) -> TrainRole:
    """A trained role as one rank can load it: the checkpoint depends neither on the ranks nor on the objective, and all
    kinds of trainer share its format. FSDP2 needs no extra package."""
    roles = {role.name: role for role in config.train_roles}
    role = next(iter(roles.values())) if name is None else roles.get(name)
    if role is None:
        raise RunRefused(f"--role {name}: the run trains {', '.join(roles)}")
    trainer = role.trainer.model_copy(
        update={"kind": "fsdp2", "deepspeed": None, "ranks": 1, "replicas": 1, "compile": "off"}
    )
    return role.model_copy(update={"objective": CrossEntropy(), "trainer": trainer})
