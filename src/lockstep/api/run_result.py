"""What a run that was started from Python returns."""

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.loaded_policy import LoadedPolicy, load_policy
from lockstep.base.folders import scratch_dir
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.ledger.ledger import Ledger
from lockstep.models.huggingface import quiet_transformers
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.score_model import set_padding_for_scores
from lockstep.report.run_summary import committed_rows, early_stop
from lockstep.run.planning.working_folder import in_working_folder
from lockstep.run.trained_models.checkpoint_export import export_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Result:
    """A run that has ended. Also made by hand, of any run: `Result("runs/sort-grpo")`.

    Args:
        folder: the folder of the run.

    Raises:
        LedgerError: this is not the folder of a run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        with Ledger.reader(self.folder) as ledger:
            self.steps = ledger.steps_done()
            """The number of steps done."""
            self.stopped_early: str | None = early_stop(ledger)
            """Why the run ended before its last step; None if it did not."""

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}, steps={self.steps})"

    @cached_property
    def config(self) -> RunConfig:
        """The config of the run, with all defaults."""
        with Ledger.reader(self.folder) as ledger:
            return check_config(ledger.config(), source=str(self.folder))

    @cached_property
    def metrics(self) -> dict[str, list[float]]:
        """The metrics of all steps, as `pandas.DataFrame` takes them: lists of equal length by name.

        `step` is the number of steps done, from 1; row 0 is the evaluation before the first step, if there is one. NaN
        where a step does not have a metric.
        """
        with Ledger.reader(self.folder) as ledger:
            trained, evaluated = committed_rows(ledger)
        rows: dict[int, dict[str, float]] = {}
        for step, values in [(row.step, row.values) for row in trained] + [
            (row.step, row.metrics) for row in evaluated
        ]:
            rows.setdefault(step + 1, {}).update(values)
        names = dict.fromkeys(name for step in sorted(rows) for name in rows[step])
        steps = sorted(rows)
        columns: dict[str, list[float]] = {"step": list[float](steps)}
        return columns | {name: [rows[step].get(name, math.nan) for step in steps] for name in names}

    @property
    def report(self) -> Path | None:
        """The HTML report; None if the config turns it off."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    def model(self, step: int | str = "last") -> "PreTrainedModel":
        """Loads the model of a checkpoint, for transformers, with an adapter merged into it: a causal language model,
        or for a run that trains a reward model one for sequence classification.

        Args:
            step: `last`, `best` (of the evaluations), or a number of steps done.

        Raises:
            RunRefused: there is no such checkpoint.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        kinds = {"vocabulary": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
        with scratch_dir("lockstep-model-") as scratch, in_working_folder(self.folder) as run:
            export_checkpoint(run, scratch / "model", str(step))
            with quiet_transformers():
                model: PreTrainedModel = kinds[self.config.model.head].from_pretrained(scratch / "model")
            return model.eval()

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Loads the tokenizer, with the chat template of the run."""
        with in_working_folder(self.folder):
            tokenizer = load_tokenizer(self.config.model)
        if self.config.head == "score":
            set_padding_for_scores(tokenizer)
        return tokenizer

    def policy(self, step: int | str = "last") -> LoadedPolicy:
        """Loads model and tokenizer; see `lockstep.load_policy`."""
        return load_policy(self.folder, step)
