import datetime
import decimal
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ledger_helpers import assert_same, make_rollouts

from lockstep.data.samples import Completion, Episode, Group, PlacedImage, Prompt, Rollouts
from lockstep.ledger import StepCorrupt, json_values, step_file

TEXT = st.text(st.characters(), max_size=12)  # every code point, lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def ints(length):
    return hnp.arrays(np.int32, length)


def floats(length):
    return hnp.arrays(np.float32, length, elements=st.floats(width=32))


@st.composite
def completions(draw):
    length = draw(st.integers(0, 5))
    return Completion(
        request=draw(TEXT),
        tokens=draw(ints(length)),
        logprobs=draw(floats(length)),
        versions=draw(ints(length)),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(TEXT),
        mask=draw(st.none() | hnp.arrays(np.bool_, length)),
        episode=draw(st.none() | episodes()),
    )


@st.composite
def episodes(draw):
    return Episode(
        messages=draw(st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        rewards=draw(st.lists(st.floats(), max_size=2)),
        ended=draw(st.sampled_from(["answer", "tokens"])),
        metrics=draw(st.dictionaries(TEXT, st.floats(), max_size=2)),
    )


@st.composite
def images(draw):
    places = np.array(sorted(draw(st.sets(st.integers(0, 40), max_size=8))), np.int32)
    sizes = [draw(st.tuples(st.integers(0, 2**31), st.integers(1, 9))) for _ in range(2)]
    return PlacedImage(draw(st.sampled_from(["00ff00ff", "12345678"])), places, draw(TEXT), *sizes)


@st.composite
def rollouts(draw):
    size = draw(st.integers(0, 3))
    names = draw(st.lists(TEXT, max_size=2, unique=True))
    groups = [
        Group(
            prompt=Prompt(
                uid=f"0:{index}",
                row=draw(st.integers(-(2**63), 2**63 - 1)),
                tokens=draw(ints(draw(st.integers(0, 4)))),
                text=draw(TEXT),
                messages=draw(st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
                answer=draw(JSON),
                columns=draw(st.dictionaries(TEXT, JSON, max_size=3)),
                images=draw(st.lists(images(), max_size=2)),
            ),
            completions=draw(st.lists(completions(), min_size=size, max_size=size)),
            rewards=draw(st.none() | floats(size)),
            breakdown={name: draw(floats(size)) for name in names},
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    return Rollouts(step=draw(st.integers(0, 2**40)), version=draw(st.integers(0, 2**40)), groups=groups)


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.dictionaries(TEXT, JSON, max_size=2))
def test_roundtrip_is_exact(tmp_path_factory, given_rollouts, extra):
    path = tmp_path_factory.mktemp("steps") / "step.arrow"
    hidden, digest, size = step_file.write_hidden_step(path, step_file.rollouts_table(given_rollouts, extra), 1)
    assert hidden.stat().st_size == size
    hidden.rename(path)
    stored = step_file.read_step_file(path, given_rollouts.step)
    assert_same(stored.rollouts, given_rollouts)
    assert_same(stored.extra, extra)
    again = step_file.write_hidden_step(path, step_file.rollouts_table(stored.rollouts, stored.extra), 1)
    assert again[1] == digest  # what was read is written as the same bytes


def test_a_step_without_conversations_is_stored_as_before(tmp_path):
    """Step files of earlier versions have the same columns, so they can be read."""
    table = step_file.rollouts_table(make_rollouts(3), {})
    fields = {field.name for field in table.schema.field("completions").type.value_type}
    assert fields == {"request", "tokens", "logprobs", "versions", "finish", "text"}
    assert "images" not in table.column_names


def test_a_mask_must_fit_its_tokens(tmp_path):
    made = make_rollouts(3)
    made.groups[0].completions[1].mask = np.ones(3, np.bool_)
    with pytest.raises(ValueError, match=r"completion 0:9/1 has a mask of bool \(3,\) for 4 tokens"):
        step_file.rollouts_table(made, {})


def test_arrays_read_back_can_be_written_to(tmp_path):
    path = tmp_path / "step.arrow"
    step_file.write_hidden_step(path, step_file.rollouts_table(make_rollouts(3), {}), 1)[0].rename(path)
    group = step_file.read_step_file(path, 3).rollouts.groups[0]
    group.completions[0].tokens[0] = 7
    group.rewards[0] = 1.0
    assert group.completions[0].tokens[0] == 7


def test_any_arrow_reader_opens_a_step_file(tmp_path):
    path = tmp_path / "step.arrow"
    step_file.write_hidden_step(path, step_file.rollouts_table(make_rollouts(3), {"packing_seed": 5}), 1)[0].rename(
        path
    )
    rows = pa.ipc.open_file(path).read_all().to_pylist()
    assert rows[0]["prompt_text"] == "sort 3 1 2"
    assert rows[0]["completions"][1]["finish"] == "stop"
    assert len(rows[0]["completions"][1]["tokens"]) == 4


def test_columns_of_parquet_readers(tmp_path):
    """Numpy scalars and arrays inside columns become plain values with the same numbers."""
    columns = {
        "level": np.int64(3),
        "share": np.float32(0.1),
        "ok": np.bool_(True),
        "name": np.str_("x"),
        "list": np.array([[1, 2], [3, 4]]),
        "objects": np.array([{"a": np.int8(1)}, None], dtype=object),
        "when": np.datetime64("2026-01-02T03:04:05.000000000", "ns"),
        "nested": {"tuple": (np.float64(0.5), 1)},
        5: {2: "keys that are not strings"},
    }
    got = json_values.loads(json_values.dumps(columns))
    assert got == {
        "level": 3,
        "share": float(np.float32(0.1)),
        "ok": True,
        "name": "x",
        "list": [[1, 2], [3, 4]],
        "objects": [{"a": 1}, None],
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "nested": {"tuple": [0.5, 1]},
        5: {2: "keys that are not strings"},
    }
    assert type(got["level"]) is int and type(got["ok"]) is bool and type(got["name"]) is str


@pytest.mark.parametrize(
    "value",
    [
        b"\x00\xff",
        decimal.Decimal("1.10"),
        datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.time(1, 2),
        datetime.timedelta(-1, 5, 7),
        {"$lockstep": "bytes", "value": "a user's own dict with our tag"},
        float("inf"),
        -0.0,
    ],
)
def test_values_of_types_that_json_lacks(value):
    assert_same(json_values.loads(json_values.dumps({"x": [value]})), {"x": [value]})


def test_values_that_cannot_be_stored_are_named():
    rollouts = make_rollouts(0)
    rollouts.groups[1].prompt.columns["image"] = {"pixels": object()}
    with pytest.raises(TypeError, match=r"columns of prompt 0:1\.image\.pixels is a builtins\.object"):
        step_file.rollouts_table(rollouts, {})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: setattr(g, "rewards", np.zeros(4)), "rewards must be float32"),
        (lambda g: setattr(g, "rewards", np.zeros(3, np.float32)), "rewards of prompt 0:0 has 3 entries for 4"),
        (lambda g: setattr(g.completions[0], "tokens", np.zeros(4, np.int64)), "completion tokens must be int32"),
        (lambda g: setattr(g.completions[0], "logprobs", np.zeros(2, np.float32)), "4 tokens, 2 logprobs"),
        (lambda g: g.completions.pop(), "need the same number"),
    ],
)
def test_rollouts_that_cannot_be_stored_exactly_are_refused(spoil, message):
    rollouts = make_rollouts(0)
    spoil(rollouts.groups[0])
    with pytest.raises(ValueError, match=message):
        step_file.rollouts_table(rollouts, {})


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_torn_step_file_is_corrupt(tmp_path, keep):
    path = tmp_path / "step.arrow"
    step_file.write_hidden_step(path, step_file.rollouts_table(make_rollouts(3), {}), 1)[0].rename(path)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(StepCorrupt, match="cannot be read"):
        step_file.read_step_file(path, 3)


def test_a_step_file_of_another_step_is_corrupt(tmp_path):
    path = tmp_path / "step.arrow"
    step_file.write_hidden_step(path, step_file.rollouts_table(make_rollouts(3), {}), 1)[0].rename(path)
    with pytest.raises(StepCorrupt, match="belongs to another step than 5"):
        step_file.read_step_file(path, 4)


def test_a_step_is_written_and_read_without_pandas(tmp_path):
    """Importing pandas would cost 0.3 s of CPU time in the first step of every run, and 39 MB when a run recovers."""
    code = (
        "import sys; from pathlib import Path; from ledger_helpers import make_rollouts;"
        "from lockstep.ledger import step_file;"
        "table = step_file.rollouts_table(make_rollouts(0), {});"
        f"hidden = step_file.write_hidden_step(Path({str(tmp_path)!r}) / 'x.arrow', table, 1)[0];"
        "step_file.read_step_file(hidden, 0), step_file.completion_images(hidden, 0);"
        "assert not {'pandas', 'pyarrow.compute'} & {*sys.modules}"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
