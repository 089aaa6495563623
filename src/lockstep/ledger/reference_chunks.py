"""Reference log-probabilities of the training data, which are computed once: immutable files of a few hundred rows."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.base.folders import make_folder
from lockstep.ledger import json_values
from lockstep.ledger.durable_files import replace_file, sha256_file
from lockstep.ledger.sqlite_index import LedgerIndex

_KEY = "reference."
"""Prefix of the keys in the index."""


@dataclass(frozen=True, slots=True)
class ReferenceChunk:
    """The log-probabilities of consecutive rows of the data."""

    key: str
    """A digest of the model and of the rows' tokens."""
    lengths: np.ndarray
    """int64 `[completions]`: the number of tokens of each completion."""
    logprobs: np.ndarray
    """float32 `[tokens]`, of all completions after each other."""


class ReferenceChunks:
    """The part of the ledger with reference log-probabilities: `reference/00000012.safetensors` has chunk 12."""

    folder: Path
    _index: LedgerIndex

    def record_reference(self, number: int, chunk: ReferenceChunk) -> None:
        """Stores a chunk durably, and replaces an earlier one of this number. Raises LedgerFull, StaleGeneration."""
        from safetensors.numpy import save  # not in the core's dependencies

        path = self.reference_path(number)
        make_folder(path.parent)
        data = save({"lengths": chunk.lengths, "logprobs": chunk.logprobs})
        entry = {"key": chunk.key, "sha256": hashlib.sha256(data).hexdigest()}
        with self._index.transaction() as transaction:
            replace_file(path, data)
            transaction.set_meta(f"{_KEY}{number}", json_values.dumps(entry, "reference"))

    def reference_key(self, number: int) -> str | None:
        """Returns the key of a chunk; None if it is not stored, or differs from what was written (sha256)."""
        found = self._index.rows("SELECT value FROM meta WHERE key = ?", f"{_KEY}{number}")
        path = self.reference_path(number)
        if not found or not path.is_file():
            return None
        entry = self._index.parse(found[0][0], dict)
        return str(entry["key"]) if sha256_file(path) == entry["sha256"] else None

    def reference_lengths(self, number: int) -> np.ndarray:
        """Returns the lengths of a stored chunk, int64 `[completions]`."""
        from safetensors import safe_open

        with safe_open(self.reference_path(number), framework="np") as stored:
            return np.asarray(stored.get_tensor("lengths"))

    def reference_logprobs(self, number: int, start: int, stop: int) -> np.ndarray:
        """Returns tokens `start` to `stop` of a stored chunk, float32, without reading the others."""
        from safetensors import safe_open

        with safe_open(self.reference_path(number), framework="np") as stored:
            return np.asarray(stored.get_slice("logprobs")[start:stop])

    def reference_path(self, number: int) -> Path:
        return self.folder / "reference" / f"{number:08d}.safetensors"
