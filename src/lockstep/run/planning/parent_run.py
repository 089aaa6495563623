"""A new run that starts from a checkpoint of another one: which checkpoint, what it takes over, and its lineage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.text import count_noun
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.ledger.config_changes import compare_config
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.ledger.sqlite_index import CheckpointRow
from lockstep.report.run_summary import PARENT_EVENT
from lockstep.run.errors import RunRefused
from lockstep.run.planning.working_folder import working_folder
from lockstep.train.checkpoints.checkpoint_files import inherit_checkpoint
from lockstep.train.checkpoints.checkpoint_retention import part_folder
from lockstep.train.errors import CheckpointError

_OWN_FIELDS = ("name", "folder")
"""Fields that differ between any two runs."""


@dataclass(frozen=True, slots=True)
class ParentRun:
    """The checkpoint that a new run starts from."""

    run: Path
    """Absolute."""
    steps: int
    """The number of steps in the checkpoint."""
    checkpoint: Path
    optimizer: bool
    """Whether the new run also takes over the optimizer's state."""
    changes: tuple[str, ...] = ()
    """How its config differs from the parent's."""
    older: tuple[int, ...] = ()
    """The numbers of steps after which the parent has older checkpoints."""

    def unusable(self, reason: str) -> CheckpointError:
        """The error that its checkpoint cannot be used, with the way to an older one."""
        return with_older_steps(CheckpointError(self.checkpoint, reason), self.older, f"--from {self.run}@")

    def note(self, config: RunConfig) -> str:
        """What the new run takes over, for the user."""
        taken = "its weights and optimizer state" if self.optimizer else "its weights; the optimizer starts afresh"
        start = f"{self.run} after {count_noun(self.steps, 'step')}"
        text = f"starting from {start} with {taken}, at step 0 of its own schedule"
        if config.policy.holds_reference or any("reference_logprob" in role.fields for role in config.serve_roles):
            text += f". The reference of the KL penalty stays the model in {config.model.path}"
        return text


def split_parent(text: str) -> tuple[Path, str]:
    """Splits `RUN@STEP` into the run's folder and the checkpoint, the newest if there is no step."""
    run, _, step = text.rpartition("@")
    if run and not (Path(text) / INDEX_FILE).is_file():
        return Path(run).expanduser().absolute(), step
    return Path(text).expanduser().absolute(), "last"


def parent_config(run: Path) -> dict[str, Any]:
    """The stored config of a run. Raises LedgerError if it is not one."""
    with Ledger.reader(run) as ledger:
        return dict(ledger.config())


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


def with_older_steps(error: CheckpointError, steps: Sequence[int], option: str) -> CheckpointError:
    """The error about a checkpoint with the way to an older one.

    Args:
        steps: the numbers of steps after which there are older checkpoints.
        option: how a command names one, before the number: `--step `.
    """
    if not steps:
        return CheckpointError(error.folder, f"{error.reason}; there is no older one")
    others = f" (there are older ones after {', '.join(map(str, steps))} steps)" if len(steps) > 1 else ""
    return CheckpointError(error.folder, f"{error.reason}; take the one before it: {option}{steps[-1]}{others}")


def older_steps(rows: Sequence[CheckpointRow], chosen: CheckpointRow) -> tuple[int, ...]:
    """The numbers of steps after which there are checkpoints older than the chosen one."""
    return tuple(row.step + 1 for row in rows if row.step < chosen.step)


def find_parent(text: str, config: RunConfig) -> ParentRun:
    """Finds the checkpoint of another run, and decides what a run with this config takes over.

    Args:
        text: `RUN@STEP`, `RUN@best` or `RUN`.

    Raises:
        RunRefused: there is no such checkpoint, or it belongs to other models.
        LedgerError, ConfigError: the run cannot be read.
    """
    run, step = split_parent(text)
    with Ledger.reader(run) as ledger:
        stored = ledger.config()
        rows = ledger.checkpoints()
        chosen = choose_checkpoint(rows, step)
    parent = check_config(dict(stored), source=str(run))
    _check_models(run, parent, config)
    if config.precomputed_fields:
        raise RunRefused(
            f"precompute_ref_log_probs takes the log-probabilities of the reference, the model in {config.model.path}, "
            f"from the policy before its first step, but this policy starts from {run}: leave it out"
        )
    trainers = [role.trainer.kind for role in parent.train_roles] == [role.trainer.kind for role in config.train_roles]
    changes = compare_config(stored, config.model_dump(mode="json"))
    shown = tuple(str(change) for change in changes if change.path not in _OWN_FIELDS)
    optimizer = parent.recipe == config.recipe and trainers
    return ParentRun(run, chosen.step + 1, chosen.path, optimizer, shown, older_steps(rows, chosen))


def begin_from(parent: ParentRun, ledger: Ledger, config: RunConfig) -> None:
    """Gives a new run the parent's checkpoint as its own after 0 steps, from which it starts, recovers and resumes
    until it has a later one. Records the lineage. Raises CheckpointError, OSError."""
    names = [role.name for role in config.train_roles]
    own = ledger.folder / "checkpoints" / f"{0:08d}"
    for name in names:
        source, target = part_folder(parent.checkpoint, name, names), part_folder(own, name, names)
        try:
            inherit_checkpoint(source, target, optimizer=parent.optimizer)
        except CheckpointError as error:
            raise parent.unusable(error.reason) from error
    ledger.record_checkpoint(-1, own)
    ledger.record_event(PARENT_EVENT, **lineage(parent))


def lineage(parent: ParentRun) -> dict[str, Any]:
    """The fields of the ledger's event."""
    return {
        "run": str(parent.run), "steps": parent.steps, "optimizer": parent.optimizer, "changes": list(parent.changes),
    }  # fmt: skip


def _check_models(run: Path, parent: RunConfig, config: RunConfig) -> None:
    """Raises RunRefused unless both runs train the same models in the same way: the same roles, models and adapters."""
    home = working_folder(run)
    before, now = (
        {role.name: _identity(role, folder) for role in each.train_roles}
        for each, folder in ((parent, home), (config, Path.cwd()))
    )
    export = f"write the model with `lockstep export {run} OUT`, and set model.path=OUT"
    if before.keys() != now.keys():
        raise RunRefused(f"{run} trains {', '.join(before)}, and the new run {', '.join(now)}: {export}")
    for name, settings in before.items():
        for field, value in settings.items():
            if now[name][field] != value:
                what = f"{name} has {field} {value!r}, and in the new run {now[name][field]!r}"
                raise RunRefused(f"a run that starts from {run} must train the same models, but {what}: {export}")


def _identity(role: TrainRole, folder: Path) -> Mapping[str, Any]:
    """What determines the tensors of a role's checkpoint.

    Args:
        folder: what relative paths refer to.
    """
    path = folder / Path(role.model.path).expanduser()
    adapter = role.model.adapter
    trained = (
        None if adapter is None else adapter.model_dump(mode="json", exclude={"lora_dropout", "init_lora_weights"})
    )
    return {
        role.field("model.path"): str(path.resolve()) if path.is_dir() else role.model.path,
        role.field("model.revision"): role.model.revision,
        role.field("model.adapter"): trained,
        role.field("model.head"): role.model.head,
        f"{role.field('model.vision')} that trains": ", ".join(role.model.vision.trained),
    }
