"""Exports the model of a checkpoint, without starting its run."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.algorithm import CrossEntropy
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import CheckpointRow
from lockstep.run.errors import RunRefused
from lockstep.run.planning.prepare import resolve_adapters
from lockstep.train.distributed import ParallelContext
from lockstep.train.rank_service import choose_device
from lockstep.train.trainer_kinds import trainer_kind


def export_checkpoint(run: Path, out: Path, step: str = "last", role: str | None = None, adapter: bool = False) -> int:
    """Writes the model of a checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads.

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
        chosen = choose_checkpoint(ledger.checkpoints(), step)
    exported = _role_on_one_rank(config, role)
    if adapter and exported.model.adapter is None:
        raise RunRefused(f"{exported.name} of {run} has no adapter: leave --adapter out")
    trainer = trainer_kind(exported).create(exported, ParallelContext(device=choose_device("auto", 0)), 1)
    try:
        trainer.load(chosen.path / exported.name if len(config.train_roles) > 1 else chosen.path)
        (trainer.export_adapter if adapter else trainer.export)(out)
    finally:
        trainer.close()
    return chosen.step + 1


def choose_checkpoint(rows: Sequence[CheckpointRow], step: str) -> CheckpointRow:
    """Returns the checkpoint that `step` names: `last`, `best`, or a number of steps done. Raises RunRefused."""
    if not rows:
        raise RunRefused("the run has no complete checkpoint yet (checkpoint.every says when it writes one)")
    known = ", ".join(str(row.step + 1) for row in rows)
    if step == "last":
        return rows[-1]
    if step == "best":
        rated = [(row.metric, row.step, row) for row in rows if row.metric is not None]
        if not rated:
            raise RunRefused(f"no checkpoint was evaluated, so none is the best: take one of {known}, or last")
        return max(rated)[2]
    found = next((row for row in rows if str(row.step + 1) == step), None)
    if found is None:
        raise RunRefused(f"--step {step}: there are checkpoints after {known} steps; take one of them, best or last")
    return found


def _role_on_one_rank(config: RunConfig, name: str | None) -> TrainRole:
    """A trained role as one rank can load it: the checkpoint does not depend on the ranks, nor on the objective."""
    roles = {role.name: role for role in config.train_roles}
    role = next(iter(roles.values())) if name is None else roles.get(name)
    if role is None:
        raise RunRefused(f"--role {name}: the run trains {', '.join(roles)}")
    trainer = role.trainer.model_copy(update={"ranks": 1, "replicas": 1, "compile": "off"})
    return role.model_copy(update={"objective": CrossEntropy(), "trainer": trainer})
