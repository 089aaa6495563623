"""What a resumed run begins with: its stored config, and what earlier starts recorded. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.json_text import read_json
from lockstep.base.text import count_noun
from lockstep.config.data import DatasetConfig
from lockstep.config.loader import apply_overrides, check_config
from lockstep.config.run_config import RunConfig
from lockstep.ledger.config_changes import ConfigChange, compare_config
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import SUMMARY_FILE
from lockstep.ledger.store.mirror import has_all
from lockstep.run.errors import RunFinished, RunRefused
from lockstep.run.evaluation.early_stopping import stop_reason
from lockstep.run.planning.working_folder import START_EVENT
from lockstep.run.run_id import release_shared_memory

StartFields = Mapping[str, Any]
"""What the event of a start recorded; see `START_EVENT`."""


def stored_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The config with which a run resumes if no file is given. Raises LedgerError, ConfigError or OSError."""
    with Ledger.reader(folder) as ledger:
        return check_config(apply_overrides(ledger.config(), overrides), source=str(folder))


def resumed_config(config: RunConfig | None, folder: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Returns the config of a resumed run, and notes on changes. Raises RunRefused for changes that would change the
    result."""
    config = config or stored_config(folder, overrides)
    with Ledger.reader(folder) as ledger:
        changes = compare_config(ledger.config(), config.model_dump(mode="json"), ledger.steps_done())
        refused = [str(change) for change in changes if change.changes_result]
        if refused:
            raise RunRefused(
                f"{folder} cannot resume with these changes, they would change its result: {'; '.join(refused)}. "
                "Start a new run for them (name=...)"
            )
        _check_not_finished(config, ledger)
    return config, _change_notes(changes)


def earlier_starts(folder: Path) -> list[StartFields]:
    """What the starts of a run recorded, the first start first."""
    with Ledger.reader(folder) as ledger:
        return [event.fields for event in ledger.events() if event.kind == START_EVENT]


def check_same_data(
    folder: Path,
    starts: Sequence[StartFields],
    sources: Sequence[DatasetConfig],
    row_counts: Sequence[int],
    row_digests: Sequence[str],
) -> None:
    """Raises RunRefused if the number of rows has changed since the run began (rows would be repeated or skipped), or
    the content of those rows that are in the digest."""
    if not starts:
        return
    # Earlier versions recorded only the total.
    before = [int(count) for count in starts[0].get("row_counts", [starts[0]["rows"]])]
    for data, old, new in zip(sources, before, row_counts, strict=True):
        if old != new:
            raise RunRefused(
                f"{data.path} had {count_noun(old, 'row')} to use when {folder} began, "
                f"and has {new} now, in another order: restore the data, or start a new run (name=...)"
            )
    digests = next((fields["row_digests"] for fields in starts if "row_digests" in fields), row_digests)
    for data, was, is_now in zip(sources, digests, row_digests, strict=True):
        if was != is_now:
            raise RunRefused(
                f"{data.path} had other rows when {folder} began, as many as now: restore the data, or start a new run "
                "(name=...)"
            )


def _check_not_finished(config: RunConfig, ledger: Ledger) -> None:
    """Raises RunFinished if the newest attempt did all steps and wrote its summary, which is its last file, and if its
    exports and its copy in a store are complete. Else the run is resumed, to make them so."""
    try:
        summary = read_json(ledger.folder / SUMMARY_FILE)
        attempt, reason, done = summary["generation"], summary["exit_reason"], summary["steps"]["done"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    exports = [ledger.folder / each.folder for each in config.exports]
    exported = all(export.is_dir() for export in exports)
    history = {row.step + 1: row.metrics for row in ledger.evaluation_metrics()}
    stopped = stop_reason(config.early_stopping, history, done)
    finished = (attempt, reason) == (ledger.generation, "finished") and (done >= config.steps or bool(stopped))
    if finished and exported and has_all(config.store, config.name, ledger.folder):
        release_shared_memory(ledger.folder)
        where = f", its model is in {' and '.join(map(str, exports))}" if exports else ""
        more = "For more, raise steps"
        if stopped:
            more = f"It stopped early: {stopped}. For more, raise early_stopping.patience"
        steps = count_noun(config.steps, "step")
        raise RunFinished(f"{ledger.folder} is finished: {done} of {steps}{where}. {more}")


def _change_notes(changes: Sequence[ConfigChange]) -> list[str]:
    bits = [str(change) for change in changes if change.changes_bits]
    if not bits:
        return []
    return [
        f"{'; '.join(bits)}: the order of additions changes, so the result will match that of the unchanged run to "
        "about 1e-5, not bitwise"
    ]
