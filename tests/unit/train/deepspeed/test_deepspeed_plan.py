"""The memory of a DeepSpeed rank, by the formulas of Rajbhandari et al. 2020 (section 3.1) and by DeepSpeed's own."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from test_engine_settings import role_of

from lockstep.models.model_facts import AdapterFacts, ModelFacts
from lockstep.train.deepspeed.deepspeed_plan import DeepSpeedPlanner

SIZE = 1000


def memory(
    dtype: str, ranks: int, size: int = SIZE, adapter: AdapterFacts | None = None, **given: Any
) -> dict[str, int]:
    facts = ModelFacts(size, 2, 8, 16, 1, 8, 64, dtype, largest_layer=300, root=400, adapter=adapter)
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


def test_float32_sums_at_stage_1_are_beside_the_gradients_of_all_parameters() -> None:
    given = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    parts = memory("bfloat16", 4, **given)
    assert (parts["gradients"], parts["buckets"]) == ((2 + 4) * SIZE, 4 * SIZE)


def test_buckets_have_the_size_of_the_settings_and_two_of_them_overlap() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 50_000}
    assert memory("float32", 2, zero_optimization=zero)["buckets"] == 4 * 50_000
    assert memory("float32", 2, zero_optimization={**zero, "overlap_comm": True})["buckets"] == 8 * 50_000
    assert "buckets" not in memory("float32", 2, zero_optimization={"stage": 0})


def test_sums_in_bfloat16_take_half() -> None:
    parts = memory("bfloat16", 2, zero_optimization={"stage": 2}, data_types={"grad_accum_dtype": "bf16"})
    assert parts["gradients"] == 2 * SIZE // 2


STATES = ("weights", "master weights", "gradients", "optimizer")


def states(stage: int, ranks: int, *, optimizer: bool, parameters: bool = False) -> int:
    """The bytes of weights, gradients and optimizer that a bfloat16 rank has on its device."""
    zero: dict[str, Any] = {"stage": stage}
    if optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if parameters:
        zero["offload_param"] = {"device": "cpu"}
    parts = memory("bfloat16", ranks, size=96_000, zero_optimization=zero)
    return sum(parts.get(name, 0) for name in STATES)


@pytest.mark.deepspeed
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_states_are_those_of_deepspeeds_estimates(ranks: int) -> None:
    two: Any = import_module("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    three: Any = import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    size = 96_000
    # DeepSpeed's estimates count this rank's gradients also in 16 bit; here these are in the buckets of stage 2, and
    # stage 3 adds into the sums.
    sixteen_bit = 2 * size // ranks
    assert states(2, ranks, optimizer=False) == two(size, ranks, cpu_offload=False)[1] - sixteen_bit
    assert states(2, ranks, optimizer=True) == two(size, ranks, cpu_offload=True)[1]
    layer = 4 * 300
    for offload, parameters in ((False, False), (True, False), (True, True)):
        expected = three(size, 300, ranks, cpu_offload=offload, cpu_offload_params=parameters)[1] - layer
        assert states(3, ranks, optimizer=offload, parameters=parameters) == expected


def test_a_second_copy_has_all_parameters_on_its_ranks() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    assert memory("float32", 8, zero_optimization=zero)["second copy"] == 4 * SIZE // 2
    adapter = AdapterFacts(parameters=40, trained_blocks=2, first_trained_layer=0, saved=60)
    assert memory("float32", 8, adapter=adapter, zero_optimization=zero)["second copy"] == 4 * (SIZE + 40) // 2
    offloaded = {**zero, "offload_param": {"device": "cpu"}}
    assert "second copy" not in memory("float32", 8, zero_optimization=offloaded)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_adapter_trains_only_its_own_parameters(stage: int) -> None:
    adapter = AdapterFacts(parameters=40, trained_blocks=2, first_trained_layer=0, saved=60)
    parts = memory("float32", 4, adapter=adapter, zero_optimization={"stage": stage})
    assert parts["optimizer"] == 8 * 100 // (4 if stage else 1)
    assert parts["weights"] == 4 * 100 // (4 if stage == 3 else 1)
    assert parts["frozen weights"] == 4 * (SIZE - 60) // (4 if stage == 3 else 1)
    assert parts["merged adapter"] == 4 * 40
