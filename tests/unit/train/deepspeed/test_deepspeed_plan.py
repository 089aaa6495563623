"""The memory of a DeepSpeed rank, by the formulas of Rajbhandari et al. 2020 (section 3.1)."""

from typing import Any

import pytest
from test_engine_settings import role_of

from lockstep.models.model_facts import ModelFacts
from lockstep.train.deepspeed.deepspeed_plan import DeepSpeedPlanner

SIZE = 1000


def memory(dtype: str, ranks: int, **given: Any) -> dict[str, int]:
    facts = ModelFacts(SIZE, 2, 8, 16, 1, 8, 64, dtype, largest_layer=300, root=400)
    return DeepSpeedPlanner().memory(role_of(given, ranks=ranks), facts, 10)


@pytest.mark.parametrize(
    ("stage", "gradients", "buckets"),
    [(1, 2 * SIZE, 2 * SIZE), (2, 4 * SIZE // 4, 2 * SIZE), (3, 4 * SIZE // 4, 2 * SIZE)],
)
def test_bfloat16_has_float32_sums_of_gradients_where_they_are_divided(
    stage: int, gradients: int, buckets: int
) -> None:
    parts = memory("bfloat16", 4, zero_optimization={"stage": stage})
    assert (parts["gradients"], parts["buckets"]) == (gradients, buckets)
    assert parts["master weights"] + parts["optimizer"] == 12 * SIZE // 4


def test_buckets_have_the_size_of_the_settings_and_two_of_them_overlap() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 50_000}
    assert memory("float32", 2, zero_optimization=zero)["buckets"] == 4 * 50_000
    assert memory("float32", 2, zero_optimization={**zero, "overlap_comm": True})["buckets"] == 8 * 50_000
    assert "buckets" not in memory("float32", 2, zero_optimization={"stage": 0})


def test_sums_in_bfloat16_take_half() -> None:
    parts = memory("bfloat16", 2, zero_optimization={"stage": 2}, data_types={"grad_accum_dtype": "bf16"})
    assert parts["gradients"] == 2 * SIZE // 2
