"""Arrow columns of the ledger's step files, to and from numpy without a Python object per token."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """int64 `[n + 1]`: where each of n consecutive pieces begins."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def numbers_column(values: np.ndarray) -> Any:
    """A column of the numbers of a 1-d array (no booleans, which Arrow packs).

    `pa.array` would import pandas to ask whether it was given one of its series: 0.3 CPU s, in the first step."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def arrays_column(arrays: Sequence[np.ndarray], dtype: type[np.generic], name: str) -> Any:
    """A list column of 1-d arrays. ValueError where one has another dtype: nothing is converted in silence."""
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} must be {np.dtype(dtype).name} arrays of one dimension, got {got}")
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return list_column([len(array) for array in arrays], numbers_column(values))


def arrays_of(column: Any) -> list[np.ndarray]:
    """The arrays of a list column: views of one writable copy."""
    values = np.array(column.values.to_numpy(zero_copy_only=True), copy=True)
    offsets = column.offsets.to_numpy()
    return [values[begin:end] for begin, end in itertools.pairwise(offsets)]


def text_column(texts: Sequence[str | None]) -> Any:
    """A string column. Lone surrogates, which JSON can hold and UTF-8 cannot, survive (`surrogatepass`)."""
    pieces = [b"" if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    mask = np.packbits(np.array([text is not None for text in texts], bool), bitorder="little").tobytes()
    return pa.LargeStringArray.from_buffers(
        len(texts),
        pa.py_buffer(offsets_of([len(piece) for piece in pieces]).tobytes()),
        pa.py_buffer(b"".join(pieces)),
        pa.py_buffer(mask),
    )


def texts_of(column: Any) -> list[str | None]:
    data = memoryview(column.buffers()[2] or b"")
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
    valid = column.is_valid().to_pylist()
    return [
        str(data[begin:end], "utf-8", "surrogatepass") if present else None
        for begin, end, present in zip(offsets[:-1], offsets[1:], valid, strict=True)
    ]


def list_column(lengths: Sequence[int], inner: Any) -> Any:
    """Groups consecutive entries of `inner` into lists of these lengths."""
    return pa.LargeListArray.from_arrays(numbers_column(offsets_of(lengths)), inner)


def spans_of(column: Any) -> list[slice]:
    """Which entries of a list column's inner column belong to each row."""
    offsets = column.offsets.to_numpy().tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets)]
