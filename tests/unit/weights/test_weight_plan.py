"""Plans of the same tensors have the same digest, and tensors do not overlap."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.weights.errors import PlanMismatch
from lockstep.weights.weight_plan import ALIGNMENT, WeightPlan

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8), st.tuples(SHAPES, st.sampled_from(["float32", "bfloat16", "int8"])), max_size=12
)


@given(TENSORS, st.randoms(use_true_random=False))
def test_the_order_of_the_tensors_does_not_matter(tensors, random):
    items = [(name, shape, dtype) for name, (shape, dtype) in tensors.items()]
    plan = WeightPlan.of(items)
    random.shuffle(items)
    assert WeightPlan.of(items) == plan and WeightPlan.of(items).digest == plan.digest
    assert WeightPlan.from_json(plan.to_json()) == plan


@given(TENSORS)
def test_tensors_are_aligned_and_do_not_overlap(tensors):
    plan = WeightPlan.of((name, shape, dtype) for name, (shape, dtype) in tensors.items())
    end = 0
    for entry in plan.entries:
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        shape, dtype = tensors[entry.name]
        assert entry.nbytes == math.prod(shape) * getattr(torch, dtype).itemsize
        end = entry.offset + entry.nbytes
    assert plan.nbytes == end and len(plan.entries) == len(tensors)


@given(TENSORS, st.data())
def test_any_change_changes_the_digest(tensors, data):
    items = [(name, shape, dtype) for name, (shape, dtype) in tensors.items()]
    plan = WeightPlan.of(items)
    other = WeightPlan.of([*items, ("\x00new", (3,), "float32")])
    with pytest.raises(PlanMismatch, match="new"):
        plan.check(other)
    if items:
        name, shape, dtype = data.draw(st.sampled_from(items))
        rest = [item for item in items if item[0] != name]
        for changed in [(name, (*shape, 2), dtype), (name, shape, "float16"), (name + "x", shape, dtype)]:
            if changed[0] in {item[0] for item in rest}:
                continue
            with pytest.raises(PlanMismatch):
                plan.check(WeightPlan.of([*rest, changed]))


def test_the_difference_is_named():
    plan = WeightPlan.of([("a", (2, 3), torch.float32), ("b", (4,), torch.float32)])
    with pytest.raises(PlanMismatch, match=r"b is float32\[5\], expected float32\[4\]"):
        plan.check(WeightPlan.of([("a", (2, 3), "float32"), ("b", (5,), "float32")]))
    with pytest.raises(PlanMismatch, match="b: missing"):
        plan.check(WeightPlan.of([("a", (2, 3), "float32")]))


def test_invalid_plans_are_refused():
    with pytest.raises(ValueError, match="once"):
        WeightPlan.of([("a", (2,), "float32"), ("a", (2,), "float32")])
    with pytest.raises(ValueError, match="dtype 'float33'"):
        WeightPlan.of([("a", (2,), "float33")])
    text = json.loads(WeightPlan.of([("a", (2,), "float32")]).to_json())
    text["tensors"][0][1] = [3]
    with pytest.raises(ValueError, match="was altered"):
        WeightPlan.from_json(json.dumps(text))
    with pytest.raises(ValueError, match="not a weight plan"):
        WeightPlan.from_json("[]")


def test_tensors_that_engines_fuse_are_adjacent_in_their_order():
    layer = "model.layers.0."
    shapes = {
        "self_attn.k_proj": (8, 64), "self_attn.o_proj": (64, 64), "self_attn.q_proj": (64, 64),
        "self_attn.v_proj": (8, 64), "mlp.up_proj": (96, 64), "mlp.gate_proj": (96, 64), "mlp.down_proj": (64, 96),
    }  # fmt: skip
    weights = [(f"{layer}{name}.weight", shape, torch.float32) for name, shape in shapes.items()]
    biases = [(f"{layer}self_attn.{name}.bias", (64,), torch.float32) for name in ("q_proj", "k_proj", "v_proj")]
    plan = WeightPlan.of([*weights, *biases])
    heads = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
    gates = [f"{layer}mlp.{name}_proj" for name in ("gate", "up")]
    for names, kind in ((heads, "weight"), (heads, "bias"), (gates, "weight")):
        for one, other in pairwise(plan.entries[plan.index[f"{name}.{kind}"]] for name in names):
            assert one.offset + one.nbytes == other.offset
