"""Stores a step's rollouts exactly, in one Arrow IPC file.

The file has one row per group and everything that is needed to train the step again (`extra` is in the metadata of the
schema). pandas, polars and duckdb can read it, and `pyarrow.feather.read_table(path)`. Columns are converted to and
from numpy without a Python object per token.
"""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from lockstep.data.samples import Completion, FinishReason, Group, PlacedImage, Prompt, Rollouts
from lockstep.ledger import json_values
from lockstep.ledger.durable_files import write_hidden
from lockstep.ledger.errors import StepCorrupt
from lockstep.ledger.json_values import decode_episode, decode_images, encode_episode, encode_images
from lockstep.ledger.sqlite_index import StoredStep


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """Returns where each of n consecutive pieces begins, and where the last one ends: int64 `[n + 1]`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def numbers_column(values: np.ndarray) -> Any:
    """Makes a column of numbers from a 1-d array (but not of booleans, which Arrow packs).

    `pa.array` would import pandas to check for its types, which costs 0.3 s of CPU time in the first step."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def numbers_of(column: Any) -> np.ndarray:
    """Returns a column of numbers as a read-only view. `to_numpy` would import pandas: a second and 39 MB."""
    return np.from_dlpack(column)


def arrays_column(arrays: Sequence[np.ndarray], dtype: type[np.generic], name: str) -> Any:
    """Makes a list column of 1-d arrays. Raises ValueError if one has another dtype, instead of converting it."""
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} must be {np.dtype(dtype).name} arrays of one dimension, got {got}")
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return list_column([len(array) for array in arrays], numbers_column(values))


def arrays_of(column: Any) -> list[np.ndarray]:
    """Returns the arrays of a list column, as views of one writable copy."""
    values = np.array(numbers_of(column.values), copy=True)
    return [values[each] for each in spans_of(column)]


def text_column(texts: Sequence[str | None]) -> Any:
    """Makes a string column. Preserves lone surrogates, which JSON allows and UTF-8 does not (`surrogatepass`)."""
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
    rows = slice(column.offset, column.offset + len(column))
    offsets = np.frombuffer(column.buffers()[1], np.int64)[rows.start : rows.stop + 1]
    mask = column.buffers()[0]  # None if all are valid. `is_valid` would import pyarrow.compute, which takes 0.1 s
    bits = np.full(-(-rows.stop // 8), 255, np.uint8) if mask is None else np.frombuffer(mask, np.uint8)
    valid = np.unpackbits(bits, bitorder="little")[rows]
    return [
        str(data[begin:end], "utf-8", "surrogatepass") if present else None
        for begin, end, present in zip(offsets[:-1], offsets[1:], valid, strict=True)
    ]


def list_column(lengths: Sequence[int], inner: Any) -> Any:
    """Groups consecutive entries of `inner` into lists of these lengths."""
    return pa.LargeListArray.from_arrays(numbers_column(offsets_of(lengths)), inner)


def spans_of(column: Any) -> list[slice]:
    """Returns which entries of a list column's inner column belong to each row."""
    return [slice(begin, end) for begin, end in itertools.pairwise(numbers_of(column.offsets).tolist())]


_FORMAT = "1"


def rollouts_table(rollouts: Rollouts, extra: dict[str, Any], first_step: int = 1) -> Any:
    """Makes the Arrow table. A ValueError or TypeError names the prompt and field that cannot be stored exactly.

    Args:
        first_step: the number that the run gives its first step.
    """
    groups = rollouts.groups
    sizes = sorted({len(group.completions) for group in groups})
    if len(sizes) > 1:
        raise ValueError(f"the groups of step {rollouts.step + 1} have {sizes} completions: all need the same number")
    prompts = [group.prompt for group in groups]
    columns = {
        "uid": text_column([prompt.uid for prompt in prompts]),
        "row": numbers_column(np.array([prompt.row for prompt in prompts], np.int64)),
        "prompt_tokens": arrays_column([prompt.tokens for prompt in prompts], np.int32, "prompt tokens"),
        "prompt_text": text_column([prompt.text for prompt in prompts]),
        "messages": text_column([_json_field(p.uid, "messages", p.messages) for p in prompts]),
        "answer": text_column([_json_field(p.uid, "answer", p.answer) for p in prompts]),
        "columns": text_column([_json_field(p.uid, "columns", p.columns) for p in prompts]),
        "completions": _completions_column(groups),
        "rewards": _rewards_column(groups),
        "breakdown": _breakdown_column(groups),
    }
    if any(prompt.images for prompt in prompts):
        images = [[image.to_json() for image in prompt.images] for prompt in prompts]
        columns["images"] = text_column([_json_field(p.uid, "images", i) for p, i in zip(prompts, images, strict=True)])
    metadata = {
        "lockstep.format": _FORMAT,
        "lockstep.step": str(rollouts.step + first_step),
        "lockstep.version": str(rollouts.version),
        "lockstep.extra": json_values.dumps(extra, "extra"),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns)).replace_schema_metadata(metadata)


def write_hidden_step(target: Path, table: Any, generation: int) -> tuple[Path, str, int]:
    """Writes the table to a hidden file in the folder of `target`, durably. Returns its path, sha256 and size. Raises
    LedgerFull."""
    counter = pa.MockOutputStream()
    _write_table(table, counter)
    size = counter.size()
    digest = hashlib.sha256()

    def write(file: IO[bytes]) -> None:
        _write_table(table, pa.PythonFile(_HashingFile(file, digest), mode="w"))

    hidden = write_hidden(target, size, write, f".{generation}.tmp")
    return hidden, digest.hexdigest(), size


def read_step_file(path: Path, step: int, first_step: int = 1) -> StoredStep:
    """Reads a step file. Raises StepCorrupt if it cannot be read, or belongs to another step."""
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().combine_chunks()
            table.validate()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            if metadata.get("lockstep.format") != _FORMAT or metadata.get("lockstep.step") != str(step + first_step):
                why = f"belongs to another step than {step + first_step}, or to another version of lockstep"
                raise StepCorrupt(path, step, why)
            groups = _groups(table)
    except FileNotFoundError as error:
        raise StepCorrupt(path, step, "is missing") from error
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, KeyError, UnicodeDecodeError) as error:
        raise StepCorrupt(path, step, f"cannot be read ({error})") from error
    rollouts = Rollouts(step=step, version=int(metadata["lockstep.version"]), groups=groups)
    return StoredStep(rollouts, json_values.loads(metadata["lockstep.extra"]))


def completion_images(path: Path, step: int) -> set[str]:
    """Returns the digests of the images of all completions in a step file, reading nothing else; none if there is no
    such file. Raises StepCorrupt if it cannot be read."""
    try:
        with pa.memory_map(str(path)) as source:
            found = [chunk.values for chunk in pa.ipc.open_file(source).read_all().column("completions").chunks]
            texts = [
                text for struct in found if "images" in _names(struct) for text in texts_of(struct.field("images"))
            ]
            return {image.digest for text in texts for image in decode_images(text)}
    except FileNotFoundError:
        return set()
    except (pa.ArrowInvalid, OSError, KeyError) as error:
        raise StepCorrupt(path, step, f"cannot be read ({error})") from error


class _HashingFile:
    """A file object that computes the hash of what is written to it."""

    closed = False

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Does nothing: the caller closes the file after fsync."""


def _write_table(table: Any, sink: Any) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _json_field(uid: str, name: str, value: Any) -> str:
    return json_values.dumps(value, f"{name} of prompt {uid}")


def _completions_column(groups: list[Group]) -> Any:
    flat = [completion for group in groups for completion in group.completions]
    for one in flat:
        if not len(one.tokens) == len(one.logprobs) == len(one.versions):
            raise ValueError(
                f"completion {one.request} has {len(one.tokens)} tokens, {len(one.logprobs)} logprobs and "
                f"{len(one.versions)} versions: one of each per token is needed"
            )
    parts = {
        "request": text_column([one.request for one in flat]),
        "tokens": arrays_column([one.tokens for one in flat], np.int32, "completion tokens"),
        "logprobs": arrays_column([one.logprobs for one in flat], np.float32, "logprobs"),
        "versions": arrays_column([one.versions for one in flat], np.int32, "versions"),
        "finish": text_column([one.finish for one in flat]),
        "text": text_column([one.text for one in flat]),
        **_turns_columns(flat),
    }
    inner = pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    return list_column([len(group.completions) for group in groups], inner)


def _turns_columns(flat: list[Completion]) -> dict[str, Any]:
    """Returns the columns that only completions with an environment have; none if the step has no such completion."""
    found: dict[str, Any] = {}
    if any(one.mask is not None for one in flat):
        found["mask"] = arrays_column([_mask_bytes(one) for one in flat], np.uint8, "masks")
    if any(one.episode is not None for one in flat):
        found["episode"] = text_column([encode_episode(one.episode, one.request) for one in flat])
    if any(one.images for one in flat):
        found["images"] = text_column([encode_images(one.images, one.request) for one in flat])
    return found


def _mask_bytes(one: Completion) -> np.ndarray:
    """Returns the mask as uint8, because numpy cannot view Arrow's packed booleans. One more item marks that there is a
    mask."""
    if one.mask is None:
        return np.zeros(0, np.uint8)
    if one.mask.dtype != np.bool_ or one.mask.shape != one.tokens.shape:
        raise ValueError(
            f"completion {one.request} has a mask of {one.mask.dtype} {one.mask.shape} for {len(one.tokens)} tokens: "
            "one bool per token is needed"
        )
    return np.append(one.mask, True).view(np.uint8)


def _rewards_column(groups: list[Group]) -> Any:
    for group in groups:
        for name, scores in [("rewards", group.rewards), *group.breakdown.items()]:
            if scores is not None and len(scores) != len(group.completions):
                raise ValueError(
                    f"{name} of prompt {group.prompt.uid} has {len(scores)} entries "
                    f"for {len(group.completions)} completions"
                )
    # A scored group has one list, an unscored one has none. So groups without completions are stored exactly, too.
    scored = [group.rewards for group in groups if group.rewards is not None]
    inner = arrays_column(scored, np.float32, "rewards")
    return list_column([int(group.rewards is not None) for group in groups], inner)


def _breakdown_column(groups: list[Group]) -> Any:
    items = [item for group in groups for item in group.breakdown.items()]
    parts = {
        "term": text_column([name for name, _ in items]),
        "scores": arrays_column([scores for _, scores in items], np.float32, "breakdown"),
    }
    inner = pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    return list_column([len(group.breakdown) for group in groups], inner)


def _groups(table: Any) -> list[Group]:
    if table.num_rows == 0:
        return []
    columns = {name: table.column(name).chunk(0) for name in table.column_names}
    completions = _completions(columns["completions"].values)
    rewards = arrays_of(columns["rewards"].values)
    terms = texts_of(columns["breakdown"].values.field("term"))
    scores = arrays_of(columns["breakdown"].values.field("scores"))
    spans = {name: spans_of(columns[name]) for name in ("completions", "rewards", "breakdown")}
    groups = []
    for index, prompt in enumerate(_prompts(columns)):
        reward = rewards[spans["rewards"][index]]
        span = spans["breakdown"][index]
        groups.append(
            Group(
                prompt=prompt,
                completions=completions[spans["completions"][index]],
                rewards=reward[0] if reward else None,
                breakdown={str(name): values_ for name, values_ in zip(terms[span], scores[span], strict=True)},
            )
        )
    return groups


def _prompts(columns: dict[str, Any]) -> list[Prompt]:
    texts = {name: texts_of(columns[name]) for name in ("uid", "prompt_text", "messages", "answer", "columns")}
    tokens = arrays_of(columns["prompt_tokens"])
    images = texts_of(columns["images"]) if "images" in columns else ["[]"] * len(tokens)
    return [
        Prompt(
            uid=str(texts["uid"][index]),
            row=row,
            tokens=tokens[index],
            text=str(texts["prompt_text"][index]),
            messages=json_values.loads(str(texts["messages"][index])),
            answer=json_values.loads(str(texts["answer"][index])),
            columns=json_values.loads(str(texts["columns"][index])),
            images=[PlacedImage.from_json(image) for image in json_values.loads(str(images[index]))],
        )
        for index, row in enumerate(numbers_of(columns["row"]).tolist())
    ]


def _names(struct: Any) -> set[str]:
    return {field.name for field in struct.type}


def _completions(struct: Any) -> list[Completion]:
    texts = {name: texts_of(struct.field(name)) for name in ("request", "finish", "text")}
    arrays = {name: arrays_of(struct.field(name)) for name in ("tokens", "logprobs", "versions")}
    present = _names(struct)
    none: list[Any] = [None] * len(struct)
    masks: list[Any] = arrays_of(struct.field("mask")) if "mask" in present else none
    episodes = texts_of(struct.field("episode")) if "episode" in present else none
    images = texts_of(struct.field("images")) if "images" in present else none
    return [
        Completion(
            request=str(texts["request"][index]),
            tokens=arrays["tokens"][index],
            logprobs=arrays["logprobs"][index],
            versions=arrays["versions"][index],
            finish=cast(FinishReason, texts["finish"][index]),
            text=str(texts["text"][index]),
            mask=None if masks[index] is None or not len(masks[index]) else masks[index][:-1].view(np.bool_),
            episode=decode_episode(episodes[index]),
            images=decode_images(images[index]),
        )
        for index in range(len(struct))
    ]
