"""ZeRO++: a second copy of the parameters on neighbouring ranks, and quantized communication."""

from typing import Any

import pytest
from test_engine_settings import role_of

from lockstep.train.deepspeed.engine_settings import engine_settings, second_copy_ranks
from lockstep.train.errors import TrainerUnsupported

HALF = {"communication_data_type": "fp16"}


def settings(zero: dict[str, Any], device: str | None = None, ranks: int = 8, **given: Any) -> dict[str, Any]:
    role = role_of({"zero_optimization": zero, **given}, ranks=ranks)
    return engine_settings(role, "bfloat16", hidden=64, parameters=1000, device=device)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [("auto", 8, 1), (None, 8, 1), (0, 8, 1), (1, 8, 1), (4, 8, 4), (8, 8, 8), (8, 2, 2), (8, 1, 1)],
)
def test_a_second_copy_is_divided_over_no_more_ranks_than_there_are(given: Any, ranks: int, expected: int) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": given}
    assert settings(zero, ranks=ranks)["zero_optimization"]["zero_hpz_partition_size"] == expected
    assert second_copy_ranks(role_of({"zero_optimization": zero}, ranks=ranks)) == expected


@pytest.mark.parametrize(
    ("zero", "more", "message"),
    [
        (
            {"stage": 2, "zero_hpz_partition_size": 4},
            {},
            "zero_hpz_partition_size 4 at stage 2; it needs stage 3: set trainer.deepspeed.zero_optimization.stage=3",
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 3},
            {},
            "zero_hpz_partition_size 3 with trainer.ranks 8; set it to a number that divides 8",
        ),
        ({"stage": 3, "zero_hpz_partition_size": -2}, {}, "zero_hpz_partition_size -2; set it to the number of GPUs"),
        ({"stage": 3, "zero_hpz_partition_size": "2"}, {}, "zero_hpz_partition_size '2'; set it to the number of GPUs"),
        ({"stage": 2, "zero_quantized_weights": True}, {}, "zero_quantized_weights True at stage 2; it needs stage 3"),
        (
            {"stage": 3, "zero_quantized_weights": True},
            {"device": "cpu"},
            "trainer.deepspeed.zero_optimization.zero_quantized_weights True on device cpu; its kernels need GPUs",
        ),
        (
            {"stage": 3, "zero_quantized_gradients": True},
            {"device": "cpu", **HALF},
            "trainer.deepspeed.zero_optimization.zero_quantized_gradients True on device cpu; its kernels need GPUs",
        ),
        (
            {"stage": 3, "zero_quantized_gradients": True},
            {"device": "cuda"},
            "zero_quantized_gradients with communication_data_type None; its kernels read gradients as float16: set",
        ),
        (
            {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False},
            {"device": "cuda", **HALF},
            "zero_quantized_gradients with reduce_scatter False; it replaces reduce_scatter",
        ),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, {"device": "cuda"}, "in float16 only"),
    ],
)
def test_what_deepspeed_would_ignore_or_compute_wrongly_is_refused(
    zero: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerUnsupported) as caught:
        settings(zero, **more)
    assert message in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", None])
def test_quantized_communication_is_taken_on_gpus_and_where_the_device_is_not_known_yet(device: str | None) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = settings(zero, device, **HALF)
    assert found["zero_optimization"].items() >= zero.items()
    assert found["communication_data_type"] == "fp16"
