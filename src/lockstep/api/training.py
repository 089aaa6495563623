"""`lockstep.train`: prepares and runs a training from Python, as `lockstep train` does."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import recipes
from lockstep.api.run_inputs import RewardTerms, Rows, RunInputs
from lockstep.api.run_result import Result
from lockstep.config.loader import apply_overrides, check_config, read_yaml
from lockstep.config.run_config import RunConfig
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.report.command_events import TERMINAL
from lockstep.report.step_callbacks import OnStep
from lockstep.run.errors import Interrupted, NotStarted, RunFinished, RunRefused
from lockstep.run.planning.input_files import check_known_inputs, written_inputs
from lockstep.run.planning.parent_run import parent_config, split_parent
from lockstep.run.planning.prepare import PreparedRun, prepare_run
from lockstep.run.planning.working_folder import in_working_folder

if TYPE_CHECKING:
    from datasets import Dataset

_IN_PROGRESS = threading.Lock()
"""Held while a training runs: the beacon, the current folder and the handlers of signals belong to the process."""

Config = RunConfig | Mapping[str, Any] | str | Path


def train(
    config: Config | None = None,
    *,
    data: "Dataset | Rows | None" = None,
    evaluation_data: "Dataset | Rows | None" = None,
    rewards: RewardTerms | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    resume: bool | str | Path = False,
    parent: str | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
) -> Result:
    """Trains a model. Defaults, output folder and behaviour are those of `lockstep train`, which can resume the run.

    Args:
        config: the path of a YAML file, a dict with the same keys, or a config object. With `resume` or `parent` it
            may be absent: then the run has the config of that one.
        data: a `datasets.Dataset` or a list of dicts, in place of `data.path`. It becomes a file in the run's folder.
        evaluation_data: the same, in place of `evaluation.data.path`.
        rewards: functions, and terms as in the config, in place of `reward.terms`. A function that is defined in the
            script or notebook itself is copied, with what it needs, into a file in the run's folder.
        overrides: values of the config by dotted key, `{"trainer.optimizer.lr": 5e-4}`, or as on the command line.
        resume: True resumes the run of this name if there is one, and begins it otherwise; or the folder of a run.
        parent: begin a new run from a checkpoint of another one: `RUN`, `RUN@best` or `RUN@120`.
        on_step: called after each step with the number of steps done, from 1, and the step's metrics; or several such
            functions. Return `lockstep.STOP` to end the run there.

    Returns:
        The run, which is finished: at its last step, or at the one at which it was stopped early.

    Raises:
        ConfigError, RunRefused, DataError, ModelError, LedgerError, FunctionNotCarried, RewardFunctionError: the run
            cannot start as requested; nothing was started, and nothing on disk was touched.
        NotStarted: the processes of a new run did not start. `__cause__` is the reason.
        RewardError, RemoteError, WorkerDied, GaveUp, CallbackFailed: the run failed, and can be resumed.
        KeyboardInterrupt: Ctrl-C; the step was finished (or, at the second one, not), and the run can be resumed.
    """
    changes = _override_lines(overrides)
    values = _config_values(config, parent)
    folder = _folder_to_resume(values, resume, changes)
    place = None if parent is None else "{}@{}".format(*split_parent(parent))
    callbacks = (on_step,) if callable(on_step) else tuple(on_step)
    from_parent = split_parent(parent)[0] if parent is not None and config is None else None
    with _alone(), _working_folder(folder or from_parent) as found:
        run = None if folder is None else found
        if values is None:
            if run is None:
                raise RunRefused("name a config to train from, or a run to resume")
            if data is not None or evaluation_data is not None or rewards is not None:
                raise RunRefused(
                    "data and rewards of a resumed run are its own: leave them out, or give its config too"
                )
            return _run(lambda: prepare_run(None, run, changes), callbacks, run)
        values = _with_arguments(values, data, evaluation_data, rewards)
        inputs = RunInputs(_named_folder(values, changes) if run is None else _own_folder(run))
        checked = check_config(apply_overrides(inputs.replace(values), changes), source=_source_name(config))
        if run is not None:
            check_known_inputs(run, inputs.contents)
            return _run(lambda: prepare_run(checked, run, parent=place), callbacks, run)
        new = Path(checked.folder) / checked.name
        with written_inputs(new, inputs.contents):
            return _run(lambda: prepare_run(checked, None, parent=place), callbacks, new)


@contextmanager
def _alone() -> Iterator[None]:
    """Raises RunRefused if another training runs in this process, such as the one whose callback calls this."""
    if not _IN_PROGRESS.acquire(blocking=False):
        raise RunRefused("another training runs in this process: wait for its end, or start another process")
    try:
        yield
    finally:
        _IN_PROGRESS.release()


def _run(prepare: Callable[[], PreparedRun], callbacks: Sequence[OnStep], folder: Path) -> Result:
    """Prepares and runs; errors of a run that began say how to resume it."""
    try:
        prepared = prepare()
    except RunFinished as done:
        TERMINAL.note(str(done))
        return Result(folder)
    prepared.callbacks = callbacks
    for note in prepared.notes:
        TERMINAL.note(note)
    try:
        recipes.train(prepared)
    except Interrupted as stop:
        raise KeyboardInterrupt(f"{stop}; {_resume_hint(folder)}") from None
    except NotStarted:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if (folder / INDEX_FILE).is_file():
            error.add_note(f"{_resume_hint(folder)}; full logs: {folder}/logs")
        raise
    return Result(folder)


def _resume_hint(folder: Path) -> str:
    return f"resume with lockstep.train(resume={str(folder)!r})"


def _override_lines(overrides: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as on the command line. JSON is YAML, so that values keep their types."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    if isinstance(overrides, str):
        raise TypeError(f"overrides is {overrides!r}: give a dict, or a list of 'section.key=value'")
    return list(overrides)


def _config_values(config: Config | None, parent: str | None) -> dict[str, Any] | None:
    """The keys and values of a config, which may have objects among them; None if there is no config."""
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json")
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None:
        return read_yaml(Path(config))
    if parent is not None:
        return parent_config(split_parent(parent)[0])
    return None


def _source_name(config: Config | None) -> str:
    return str(config) if isinstance(config, str | Path) else "config"


def _folder_to_resume(
    values: Mapping[str, Any] | None, resume: bool | str | Path, overrides: Sequence[str]
) -> Path | None:
    if resume is False:
        return None
    if resume is not True:
        return Path(resume)
    if values is None:
        raise RunRefused("resume=True resumes the run that the config names: give the config, or resume='runs/NAME'")
    folder = _named_folder(values, overrides)
    return folder if (folder / INDEX_FILE).is_file() else None


def _named_folder(values: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """The folder of the run that a config names, which is not checked yet."""
    named = {name: values[name] for name in ("folder", "name") if name in values}
    chosen = [each for each in overrides if each.partition("=")[0].strip() in ("folder", "name")]
    found = apply_overrides(named, chosen)
    return Path(str(found.get("folder", RunConfig.model_fields["folder"].default))) / str(found.get("name", ""))


def _own_folder(run: Path) -> Path:
    """The folder of an existing run as its own config names it, and so the paths of its inputs."""
    with Ledger.reader(run) as ledger:
        return _named_folder(ledger.config(), ())


def _with_arguments(
    values: Mapping[str, Any], data: object | None, evaluation_data: object | None, rewards: RewardTerms | None
) -> dict[str, Any]:
    """The config with the arguments in their places, which may still be objects."""
    result = dict(values)
    if data is not None:
        section = result.get("data")
        kept = section if isinstance(section, Mapping) else {}
        result["data"] = {**{name: value for name, value in kept.items() if name != "mixture"}, "path": data}
    if evaluation_data is not None:
        section = result.get("evaluation") or {}
        inner = section.get("data")
        kept = inner if isinstance(inner, Mapping) else {}
        result["evaluation"] = {**section, "data": {**kept, "path": evaluation_data}}
    if rewards is not None:
        result["reward"] = {**(result.get("reward") or {}), "terms": rewards}
    return result


@contextmanager
def _working_folder(run: Path | None) -> Iterator[Path | None]:
    """Changes to the folder in which a run began, if its config is used. Yields the path of the run from there."""
    if run is None:
        yield None
        return
    before = Path.cwd()
    with in_working_folder(run) as found:
        if Path.cwd() != before:
            TERMINAL.note(f"relative paths in the config refer to {Path.cwd()}, where the run began")
        yield found
