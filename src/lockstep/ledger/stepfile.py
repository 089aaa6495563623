"""A step's rollouts as one Arrow IPC file, bit for bit.

One row per group. Everything the step needs to be trained again is in the file (`extra` too, in the schema's
metadata), and pandas, polars or duckdb read it as it is: `pyarrow.feather.read_table(path)`."""

import hashlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from lockstep.data.samples import Completion, FinishReason, Group, Prompt, Rollouts
from lockstep.ledger import values
from lockstep.ledger.columns import (
    arrays_column,
    arrays_of,
    list_column,
    numbers_column,
    spans_of,
    text_column,
    texts_of,
)
from lockstep.ledger.episodes import dumped, loaded
from lockstep.ledger.errors import StepCorrupt
from lockstep.ledger.files import prepare
from lockstep.ledger.records import Stored

_FORMAT = "1"


def table_of(rollouts: Rollouts, extra: dict[str, Any]) -> Any:
    """The Arrow table. ValueError or TypeError names the prompt and field that cannot be stored as it is."""
    groups = rollouts.groups
    sizes = sorted({len(group.completions) for group in groups})
    if len(sizes) > 1:
        raise ValueError(f"the groups of step {rollouts.step} have {sizes} completions: all must have equally many")
    prompts = [group.prompt for group in groups]
    columns = {
        "uid": text_column([prompt.uid for prompt in prompts]),
        "row": numbers_column(np.array([prompt.row for prompt in prompts], np.int64)),
        "prompt_tokens": arrays_column([prompt.tokens for prompt in prompts], np.int32, "prompt tokens"),
        "prompt_text": text_column([prompt.text for prompt in prompts]),
        "messages": text_column([_json(p.uid, "messages", p.messages) for p in prompts]),
        "answer": text_column([_json(p.uid, "answer", p.answer) for p in prompts]),
        "columns": text_column([_json(p.uid, "columns", p.columns) for p in prompts]),
        "completions": _completions_column(groups),
        "rewards": _rewards_column(groups),
        "breakdown": _breakdown_column(groups),
    }
    metadata = {
        "lockstep.format": _FORMAT,
        "lockstep.step": str(rollouts.step),
        "lockstep.version": str(rollouts.version),
        "lockstep.extra": values.dumps(extra, "extra"),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns)).replace_schema_metadata(metadata)


def prepare_file(target: Path, table: Any, generation: int) -> tuple[Path, str, int]:
    """Writes the table under a hidden name beside `target`, durably: hidden path, sha256, bytes. LedgerFull."""
    counter = pa.MockOutputStream()
    _write_table(table, counter)
    size = counter.size()
    digest = hashlib.sha256()

    def write(file: IO[bytes]) -> None:
        _write_table(table, pa.PythonFile(_Hashing(file, digest), mode="w"))

    hidden = prepare(target, size, write, f".{generation}.tmp")
    return hidden, digest.hexdigest(), size


def read_file(path: Path, step: int) -> Stored:
    """The content of a step file. StepCorrupt where it cannot be read or is another step's."""
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().combine_chunks()
            table.validate()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            if metadata.get("lockstep.format") != _FORMAT or metadata.get("lockstep.step") != str(step):
                raise StepCorrupt(path, step, f"is not one of step {step}, or of another version of lockstep")
            groups = _groups(table)
    except FileNotFoundError as error:
        raise StepCorrupt(path, step, "is missing") from error
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, KeyError, UnicodeDecodeError) as error:
        raise StepCorrupt(path, step, f"cannot be read ({error})") from error
    rollouts = Rollouts(step=step, version=int(metadata["lockstep.version"]), groups=groups)
    return Stored(rollouts, values.loads(metadata["lockstep.extra"]))


class _Hashing:
    """A file that hashes what is written to it."""

    closed = False

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The caller closes the file, after fsync."""


def _write_table(table: Any, sink: Any) -> None:
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _json(uid: str, name: str, value: Any) -> str:
    return values.dumps(value, f"{name} of prompt {uid}")


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
    """What only completions with an environment have; a step without any has no such columns."""
    found: dict[str, Any] = {}
    if any(one.mask is not None for one in flat):
        found["mask"] = arrays_column([_mask_bytes(one) for one in flat], np.uint8, "masks")
    if any(one.episode is not None for one in flat):
        found["episode"] = text_column([dumped(one.episode, one.request) for one in flat])
    return found


def _mask_bytes(one: Completion) -> np.ndarray:
    """uint8, since Arrow keeps bools as bits, which numpy cannot view; one item more than tokens says that it is
    there."""
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
    # An unscored group is a list of no lists, a scored one of one: exact also for groups without completions.
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
    return [
        Prompt(
            uid=str(texts["uid"][index]),
            row=row,
            tokens=tokens[index],
            text=str(texts["prompt_text"][index]),
            messages=values.loads(str(texts["messages"][index])),
            answer=values.loads(str(texts["answer"][index])),
            columns=values.loads(str(texts["columns"][index])),
        )
        for index, row in enumerate(columns["row"].to_pylist())
    ]


def _completions(struct: Any) -> list[Completion]:
    texts = {name: texts_of(struct.field(name)) for name in ("request", "finish", "text")}
    arrays = {name: arrays_of(struct.field(name)) for name in ("tokens", "logprobs", "versions")}
    there = {field.name for field in struct.type}
    none: list[Any] = [None] * len(struct)
    masks: list[Any] = arrays_of(struct.field("mask")) if "mask" in there else none
    episodes = texts_of(struct.field("episode")) if "episode" in there else none
    return [
        Completion(
            request=str(texts["request"][index]),
            tokens=arrays["tokens"][index],
            logprobs=arrays["logprobs"][index],
            versions=arrays["versions"][index],
            finish=cast(FinishReason, texts["finish"][index]),
            text=str(texts["text"][index]),
            mask=None if masks[index] is None or not len(masks[index]) else masks[index][:-1].view(np.bool_),
            episode=loaded(episodes[index]),
        )
        for index in range(len(struct))
    ]
