"""DeepSpeed JSON files of other projects, and what contradicts a run's config."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.train_role import TrainRole
from lockstep.train.deepspeed.engine_settings import engine_settings, may_change_layers, offloads, zero_stage
from lockstep.train.errors import TrainerUnsupported

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
ZERO3_AUTO = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
R1_ZERO2 = {
    **AUTO_BATCH,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, "allgather_partitions": True,
        "allgather_bucket_size": 2e8, "overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "steps_per_print": 100, "wall_clock_breakdown": False,
}  # fmt: skip
R1_ZERO3 = {
    **AUTO_BATCH,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, **ZERO3_AUTO, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 100, "wall_clock_breakdown": False,
}  # fmt: skip
R1_ZERO3_OFFLOAD = {
    **AUTO_BATCH,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, **ZERO3_AUTO, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
OPENRLHF = {
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 2, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none", "pin_memory": True},
        "sub_group_size": "auto", "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto",
        **ZERO3_AUTO, "zero_hpz_partition_size": 1, "zero_quantized_weights": False,
        "zero_quantized_gradients": False, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip
FILES = {"r1 zero2": R1_ZERO2, "r1 zero3": R1_ZERO3, "r1 zero3_offload": R1_ZERO3_OFFLOAD, "openrlhf": OPENRLHF}
"""Written anew from the keys that VLM-R1 and OpenRLHF document."""


def role_of(deepspeed: Any = None, **trainer: Any) -> TrainRole:
    values = {
        "recipe": "sft", "name": "a", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "trainer": {"kind": "deepspeed", "deepspeed": deepspeed, **trainer},
    }  # fmt: skip
    return check_config(values, "run.yaml").policy  # type: ignore[attr-defined,no-any-return]


def leaves(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return [leaf for each in values.values() for leaf in leaves(each)]
    return [values]


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_projects_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILES[name]))
    found = engine_settings(role_of(str(path)), "bfloat16", hidden=64, parameters=10**6)
    assert "auto" not in leaves(found)
    assert found["bf16"] == {"enabled": True}
    assert found["gradient_clipping"] == 1.0
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (1, 1)
    zero = found["zero_optimization"]
    assert zero["stage"] == FILES[name]["zero_optimization"]["stage"] == zero_stage(role_of(str(path)))
    if "zero3" in name:  # transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.trainer_config_finalize
        assert zero["reduce_bucket_size"] == 64 * 64
        assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
        assert zero["stage3_param_persistence_threshold"] == 640
    assert found.get("zero_force_ds_cpu_optimizer", True) is ("offload" not in name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_clipping": 0.5}, "trainer.deepspeed.gradient_clipping 0.5 with trainer.max_grad_norm 1.0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            "params.lr 0.001 with trainer.optimizer.lr",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
            "[0.9, 0.95] with trainer.optimizer",
        ),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type 'Muon'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "follows trainer.schedule"),
        ({"bf16": {"enabled": True}}, "bf16.enabled True with model.dtype float32"),
        ({"fp16": {"enabled": True}}, "fp16.enabled True"),
        ({"train_batch_size": 64}, "train_batch_size 64"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization?"),
        ({"zero_optimization": {"stage": 4}}, "stage 4; set it to 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean overlap_comm?"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device 'nvme'"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param at stage 2"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size; the parts of MiCS"),
        ({"zero_optimization": 3}, "it must be a JSON object"),
        ({"prescale_gradients": True}, "prescale_gradients True"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor 2.0"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer False"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer True"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type 'OneCycle'"),
        ({"bf16": {"immediate_grad_update": True}}, "bf16.immediate_grad_update True"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states True"),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow False"),
        ({"bf16": {"enable": True}}, "did you mean enabled?"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype 'bf16' with model.dtype float32; leave"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype 'bf16'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "did you mean grad_accum_dtype?"),
        ({"zero_optimization": {"cpu_offload": True}}, "set zero_optimization.offload_optimizer.device"),
        ({"zero_optimization": {"cpu_offload_param": True}}, "set zero_optimization.offload_param.device"),
        ({"zero_optimization": {"cpu_offload_use_pin_memory": True}}, "cpu_offload_use_pin_memory True"),
        (
            {"zero_optimization": {"module_granularity_threshold": 5}},
            "zero_optimization.module_granularity_threshold 5",
        ),
        ({"zero_optimization": {"stage3_module_granularity_threshold": 5}}, "stage3_module_granularity_threshold 5"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "offload_optimizer.ratio 0.5"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload True"),
        ({"zero_optimization": {"offload_optimizer": {"pin_memry": True}}}, "did you mean pin_memory?"),
    ],
)
def test_what_contradicts_the_run_is_refused_with_both_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerUnsupported) as caught:
        engine_settings(role_of(given), "float32", hidden=64, parameters=10**6)
    assert message in str(caught.value)


OFF = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": None,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "bf16": {"enabled": "auto", "immediate_grad_update": False, "check_grad_overflow": True},
    "data_types": {"grad_accum_dtype": "auto"},
    "zero_optimization": {
        "stage": 2, "cpu_offload": False, "cpu_offload_param": None, "stage3_module_granularity_threshold": 0,
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto", "ratio": 1.0, "super_offload": False},
        "offload_param": {"device": "auto"},
    },
}  # fmt: skip
"""Values that ask for nothing special."""


def test_values_that_ask_for_nothing_are_taken_and_auto_is_left_to_deepspeed() -> None:
    found = engine_settings(role_of(OFF), "float32", hidden=64, parameters=1000)
    assert "auto" not in leaves(found)
    assert found["zero_optimization"] == {
        "stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0, "super_offload": False},
        "reduce_bucket_size": 1000, "zero_hpz_partition_size": 1,
    }  # fmt: skip
    assert "data_types" not in found


@pytest.mark.parametrize("value", [None, {}, {"zero_optimization": None}])
def test_absent_sections_are_empty(value: Any) -> None:
    role = role_of(value)
    assert not offloads(role, "offload_optimizer")
    assert engine_settings(role, "float32", hidden=64, parameters=10)["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("stage", "given", "expected"),
    [
        (1, None, None),
        (1, "bf16", "bf16"),
        (1, "fp32", "fp32"),
        (2, None, "fp32"),
        (3, "auto", "fp32"),
        (3, "fp32", "fp32"),
        (2, "bf16", "bf16"),
    ],
)
def test_bfloat16_gradients_are_summed_in_float32_unless_the_settings_say_otherwise(
    stage: int, given: str | None, expected: str | None
) -> None:
    role = role_of({"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": given}})
    found = engine_settings(role, "bfloat16", hidden=64, parameters=10)
    assert found.get("data_types") == (expected and {"grad_accum_dtype": expected})


@pytest.mark.parametrize(
    ("zero", "fuses"),
    [
        ({"stage": 0}, True),
        ({"stage": 1}, True),
        ({"stage": 1, "overlap_comm": True}, False),
        ({}, False),
        ({"stage": 3}, False),
    ],
)
def test_layers_are_fused_or_compiled_only_where_the_order_of_gradients_does_not_matter(
    zero: dict[str, Any], fuses: bool
) -> None:
    assert may_change_layers(role_of({"zero_optimization": zero})) is fuses


@pytest.mark.parametrize(
    ("stage", "offload", "places"),
    [
        (1, {"optimizer": True}, ["offload_optimizer"]),
        (2, {"optimizer": True, "parameters": False}, ["offload_optimizer"]),
        (3, {"parameters": True}, ["offload_param"]),
        (3, {"optimizer": True, "parameters": True}, ["offload_optimizer", "offload_param"]),
    ],
)
def test_offloading_becomes_deepspeeds(stage: int, offload: dict[str, bool], places: list[str]) -> None:
    role = role_of({"zero_optimization": {"stage": stage}}, offload=offload)
    found = engine_settings(role, "float32", hidden=64, parameters=1000)
    zero = found["zero_optimization"]
    assert {place: zero[place] for place in places} == {place: {"device": "cpu"} for place in places}
    assert sorted(place for place in zero if place.startswith("offload")) == places
    assert found.get("zero_force_ds_cpu_optimizer", True) is ("offload_optimizer" not in places)


@pytest.mark.parametrize(
    ("zero", "offload", "message"),
    [
        (
            {"stage": 0},
            {"optimizer": True},
            "trainer.offload.optimizer at stage 0; it needs stage 1 or more: set "
            "trainer.deepspeed.zero_optimization.stage=1, or set trainer.offload.optimizer=false",
        ),
        ({"stage": 2}, {"parameters": True}, "trainer.offload.parameters at stage 2; it needs stage 3"),
        (
            {"offload_optimizer": {"device": "none"}},
            {"optimizer": True},
            "offload_optimizer.device 'none' with trainer.offload.optimizer true; they must agree",
        ),
    ],
)
def test_offloading_that_the_stage_or_the_file_excludes_is_refused(
    zero: dict[str, Any], offload: dict[str, bool], message: str
) -> None:
    with pytest.raises(TrainerUnsupported) as caught:
        engine_settings(role_of({"zero_optimization": zero}, offload=offload), "float32", hidden=64, parameters=1000)
    assert message in str(caught.value)


def test_values_that_agree_are_taken() -> None:
    given = {"gradient_clipping": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
    role = role_of(given, max_grad_norm=2.0, optimizer={"lr": 1e-4, "betas": [0.9, 0.95]})
    assert engine_settings(role, "float32", hidden=64, parameters=10**6)["gradient_clipping"] == 2.0


def test_stage_0_has_no_master_weights_for_bfloat16() -> None:
    with pytest.raises(TrainerUnsupported, match="bfloat16 at stage 0"):
        engine_settings(role_of({"zero_optimization": {"stage": 0}}), "bfloat16", hidden=64, parameters=10**6)


def test_settings_need_the_kind_and_a_file_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no effect with kind fsdp2"):
        role_of({}, kind="fsdp2")
    with pytest.raises(ConfigError, match="cannot be read"):
        role_of(str(tmp_path / "missing.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        role_of(str(broken))
