"""Reference log-probabilities of all data of a run, computed once before the first step."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.base.text import count_noun
from lockstep.config.model import ModelConfig
from lockstep.data.forest import Forest
from lockstep.data.mini_batches import TrainingBatch
from lockstep.data.sample_sources import SampleSource
from lockstep.data.samples import LabelledCompletion, Pair
from lockstep.ledger.reference_chunks import ReferenceChunk
from lockstep.models.hf_checkpoint import folder_digest, resolve_folder
from lockstep.run.errors import RunRefused
from lockstep.run.run import Run
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

CHUNK_ROWS = 256
"""Samples of a chunk: after an interruption, at most one chunk is computed again."""
REFERENCE = "reference"
"""For which images are kept while a chunk is computed."""


class PrecomputedReference:
    """The reference's log-probabilities, by token, of every completion of the data.

    They are those of the policy before its first step, and are in the run's folder, in chunks. A chunk has a digest of
    the model and of its samples' tokens. One that does not have the digest of today's model and data is computed again;
    once the policy has been trained that is impossible, and refused.

    Args:
        forest: builds the trees of samples, with sequences for their completions in order.
    """

    def __init__(self, run: Run, forest: Callable[[Sequence[Any]], Forest]) -> None:
        self._run, self._forest = run, forest
        self._rows = used_rows(run.samples)
        self._model = model_digest(run.config.model)
        self._bounds: list[np.ndarray] = []
        """Of each chunk that is present, where its completions begin and end: int64 `[completions + 1]`."""
        self._warned = False

    def compute_next(self) -> bool:
        """Looks at the next chunk, and computes it unless it is stored. Returns whether all are present.

        Raises:
            RunRefused: the chunk is stale or damaged, and the policy is not the reference any more.
        """
        number, ledger, data = len(self._bounds), self._run.ledger, self._run.roles.data
        rows = self._rows[number * CHUNK_ROWS : (number + 1) * CHUNK_ROWS]
        samples = [self._run.samples.sample(int(row)) for row in rows]
        data.hold(REFERENCE, samples)
        key, stored = samples_digest(self._model, samples), ledger.reference_key(number)
        if stored != key:
            self._check_untrained(number, stale=stored is not None)
            ledger.record_reference(number, self._compute(key, samples))
        data.release(REFERENCE)
        self._bounds.append(np.concatenate([[0], np.cumsum(ledger.reference_lengths(number))]))
        done = min((number + 1) * CHUNK_ROWS, len(self._rows))
        current_beacon().progress("samples", done, len(self._rows))
        return done == len(self._rows)

    def annotate(self, batch: TrainingBatch, samples: Sequence[Any]) -> None:
        """Adds the field `reference_logprob` to a step's batch, 0 for tokens of prompts.

        Args:
            samples: those of the batch, in the order of its trees.
        """
        in_prompt = batch.fields.get("in_prompt", np.zeros(batch.targets)) > 0
        targets = np.flatnonzero(~in_prompt)
        in_order = targets[np.argsort(batch.sequences[targets], kind="stable")]
        values = np.zeros(batch.targets, np.float32)
        values[in_order] = np.concatenate([self._logprobs_of(sample.row) for sample in samples])
        batch.set_per_target("reference_logprob", values)

    def _logprobs_of(self, row: int) -> np.ndarray:
        """The log-probabilities of a row's completions after each other, float32 `[tokens]`."""
        number, place = divmod(int(np.searchsorted(self._rows, row)), CHUNK_ROWS)
        bounds = self._bounds[number]
        samples = min(CHUNK_ROWS, len(self._rows) - number * CHUNK_ROWS)
        sides = (len(bounds) - 1) // samples
        start, stop = bounds[place * sides], bounds[(place + 1) * sides]
        return self._run.ledger.reference_logprobs(number, int(start), int(stop))

    def _compute(self, key: str, samples: Sequence[Any]) -> ReferenceChunk:
        run = self._run
        batch = run.policy.pack(self._forest(samples), run.config.token_budget)
        logprobs = run.policy.evaluate_targets(batch, "logprobs")
        order = np.argsort(batch.sequences, kind="stable")
        lengths = np.bincount(batch.sequences).astype(np.int64)
        return ReferenceChunk(key, lengths, logprobs[order])

    def _check_untrained(self, number: int, stale: bool) -> None:
        """Checks that the policy still is the reference. Raises RunRefused."""
        newest, path = self._run.ledger.newest_checkpoint(), self._run.ledger.reference_path(number)
        what = "belong to other data or to another model" if stale else "are missing or damaged"
        if newest is not None:
            raise RunRefused(
                f"the reference log-probabilities in {path} {what}, and the policy has been trained for "
                f"{count_noun(newest.step + 1, 'step')}, so that they cannot be computed again: restore the data, the "
                "model and the file, or start a new run (name=...)"
            )
        if stale and not self._warned:
            log.warning("the reference log-probabilities in %s %s: computing them again", path, what)
            self._warned = True


def precompute_reference(run: Run, forest: Callable[[Sequence[Any]], Forest]) -> PrecomputedReference:
    """Computes the reference's log-probabilities of all data of a run, as far as they are not in its folder. See
    `PrecomputedReference`. Raises RunRefused, GaveUp."""
    found = PrecomputedReference(run, forest)
    run.before_steps("reference", found.compute_next)
    return found


def used_rows(samples: SampleSource[Any]) -> np.ndarray:
    """The numbers of the rows in use, ascending: int64 `[rows]`."""
    starts = np.cumsum([0, *(part.size for part in samples.parts)]).tolist()
    return np.concatenate([start + part.order.rows for start, part in zip(starts, samples.parts, strict=False)])


def model_digest(model: ModelConfig) -> str:
    """A digest (hexadecimal) of a model's weights, configuration and initial adapter, see `folder_digest`."""
    digest = hashlib.sha256()
    folders = [resolve_folder(model.path, model.revision)]
    if model.adapter is not None and model.adapter.path is not None:
        folders.append(resolve_folder(model.adapter.path, field="model.adapter.path"))
    for folder in folders:
        digest.update(folder_digest(folder).encode())
        for file in ("config.json", "adapter_config.json"):
            if (folder / file).is_file():
                digest.update((folder / file).read_bytes())
    return digest.hexdigest()


def samples_digest(model: str, samples: Sequence[Pair | LabelledCompletion]) -> str:
    """A digest (hexadecimal) of a model's digest, and of the tokens and the images of samples."""
    digest = hashlib.sha256(model.encode())
    for sample in samples:
        completions = (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (sample.completion,)
        for tokens in (sample.prompt, *completions):
            digest.update(len(tokens).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
        for image in sample.images:
            digest.update(image.digest.encode())
    return digest.hexdigest()
