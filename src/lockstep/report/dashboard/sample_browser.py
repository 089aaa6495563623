"""Completions of a run for its page: listed by step, searched, and compared between two steps."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.secrets import redact_text, secret_values
from lockstep.ledger.errors import StepCorrupt
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.report.completion_samples import turn_text

SEARCH_S = 2.0
"""A search through all steps ends after this time."""
CACHED_CHARS = 32_000_000
"""Characters of the texts that stay in memory, of all runs together."""
_ALL = 1 << 40


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A completion without secrets."""

    step: int
    """From 1; 0 for an evaluation before the first step."""
    index: int
    """Its place in the step: the training samples from the best to the worst, then those of the evaluation."""
    kind: str
    """`train` or `evaluation`."""
    sample: CompletionSample
    prompt: str
    completion: str
    version: int | None

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.completion) + 500

    def matches(self, query: str) -> bool:
        """Whether a text, the prompt's id, or how it ended contains the query, in lower case."""
        return any(
            query in text.lower() for text in (self.prompt, self.completion, self.sample.uid, self.sample.finish)
        )

    def json(self, chars: int) -> dict[str, Any]:
        """`chars`: the most characters of each text; `cut` counts those left off."""
        cut = max(0, len(self.prompt) - chars) + max(0, len(self.completion) - chars)
        return {
            "step": self.step, "index": self.index, "kind": self.kind, "prompt_id": self.sample.uid,
            "number": self.sample.number, "prompt": self.prompt[:chars], "completion": self.completion[:chars],
            "answer": None if self.sample.answer is None else redact_text(str(self.sample.answer))[:chars],
            "reward": self.sample.reward, "terms": self.sample.scores, "version": self.version,
            "finish": self.sample.finish, **({"cut": cut} if cut else {}),
        }  # fmt: skip


class SampleBrowser:
    """Reads completions, and keeps the steps that were read last. May be used by several threads."""

    def __init__(self) -> None:
        self._steps: OrderedDict[tuple[Path, int, int], list[ShownSample]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def page(self, ledger: Ledger, step: int | None, query: str, offset: int, limit: int, chars: int) -> dict[str, Any]:
        """One page of the samples of a step, from 1, that match a query.

        Args:
            step: None for the newest; with a query, for all steps from the newest back, as far as time allows.
        """
        steps, query = sample_steps(ledger), query.lower()
        chosen = [step] if step is not None else steps[::-1] if query else steps[-1:]
        until = time.monotonic() + SEARCH_S
        found, complete = list[ShownSample](), True
        for number in chosen:
            if len(chosen) > 1 and time.monotonic() > until:
                complete = False
                break
            try:
                found += [each for each in self.step(ledger, number) if not query or each.matches(query)]
            except StepCorrupt:
                if len(chosen) == 1:
                    raise
                complete = False
        shown = [each.json(chars) for each in found[offset : offset + limit]]
        return {"total": len(found), "complete": complete, "steps": steps, "samples": shown}

    def of_prompt(self, ledger: Ledger, step: int, prompt_id: str, chars: int) -> list[dict[str, Any]]:
        """The samples of one prompt in a step."""
        return [each.json(chars) for each in self.step(ledger, step) if each.sample.uid == prompt_id]

    def step(self, ledger: Ledger, number: int) -> list[ShownSample]:
        """All samples of a step, from 1. Raises LedgerError if its file is damaged."""
        key = ledger.folder, ledger.generation, number
        with self._lock:
            trained = self._steps.get(key)
            if trained is not None:
                self._steps.move_to_end(key)
        if trained is None:
            trained = _training_samples(ledger, number)
            if trained:  # a step that is there stays as it is
                self._keep(key, trained)
        return [*trained, *_evaluation_samples(ledger, number, len(trained))]

    def _keep(self, key: tuple[Path, int, int], read: list[ShownSample]) -> None:
        with self._lock:
            if key not in self._steps:
                self._steps[key] = read
                self._chars += sum(each.size for each in read)
            while self._chars > CACHED_CHARS and self._steps:
                _, dropped = self._steps.popitem(last=False)
                self._chars -= sum(each.size for each in dropped)


def sample_steps(ledger: Ledger) -> list[int]:
    """The steps that have samples, from 1, or 0 for an evaluation before the first step."""
    return sorted({step + 1 for step in (*ledger.stored_steps(), *ledger.sampled_steps(), *ledger.evaluated_steps())})


def _training_samples(ledger: Ledger, number: int) -> list[ShownSample]:
    from lockstep.ledger.step_samples import NoSamples, read_samples  # needs pyarrow

    path, steps = ledger.step_path(number - 1), ledger.stored_steps()
    if number - 1 in steps and path.exists() and not path.is_file():  # a pipe would block
        raise StepCorrupt(path, number - 1, "is no file")
    try:
        read = read_samples(ledger, number, _ALL, "best") if number > 0 else None
    except NoSamples:
        read = None
    known = secret_values(os.environ)
    samples = read.samples if read is not None else []
    version = read.version if read is not None else None
    return [_shown(number, index, "train", each, version, known) for index, each in enumerate(samples)]


def _evaluation_samples(ledger: Ledger, number: int, first: int) -> list[ShownSample]:
    evaluation, known = ledger.evaluation(number - 1), secret_values(os.environ)
    samples = evaluation.samples if evaluation is not None else []
    return [_shown(number, index, "evaluation", each, number, known) for index, each in enumerate(samples, first)]


def _shown(
    step: int, index: int, kind: str, sample: CompletionSample, version: int | None, known: Collection[str]
) -> ShownSample:
    completion = sample.completion
    if sample.messages is not None:
        completion = "\n".join(f"[{each.get('role', '')}] {turn_text(each)}" for each in sample.messages)
    prompt, completion = (_clean(redact_text(text, known)) for text in (sample.prompt, completion))
    return ShownSample(step, index, kind, sample, prompt, completion, version)


def _clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 lacks."""
    return text.encode("utf-8", "replace").decode()
