"""Every rule on TRL's options, alone and with accelerate's and DeepSpeed's files."""

from typing import Any

import pytest

from tests.unit.doctor.configs.sample_configs import ACCELERATE, DEEPSPEED, TRL, ConfigWriter, bad, changed

RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"num_generations": 1}, "algorithm-group", "error"),
    ({"num_generations": 6}, "batch-groups", "error"),
    ({"generation_batch_size": 64, "steps_per_generation": 2}, "batch-generation", "error"),
    ({"generation_batch_size": 48}, "batch-generation", "error"),
    ({"eval_strategy": "steps", "per_device_eval_batch_size": 1, "num_generations": 16}, "batch-groups", "error"),
    ({"auto_find_batch_size": True}, "batch-groups", "error"),
    ({"sync_ref_model": True, "beta": 0.0}, "algorithm-kl", "error"),
    ({"use_vllm": None}, "engine-unused", "warning"),
    ({"use_vllm": False}, "zero3-generation", "warning"),
    ({"vllm_tensor_parallel_size": 3}, "parallel-engine", "error"),
    ({"vllm_server_host": "gpu7"}, "engine-mode", "warning"),
    ({"vllm_mode": "server"}, "engine-mode", "warning"),
    ({"vllm_max_model_length": 1024}, "length-engine", "error"),
    ({"fp16": True, "bf16": True}, "trainer-precision", "error"),
    ({"load_best_model_at_end": True}, "trainer-best", "error"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 100, "save_steps": 250},
        "trainer-best",
        "error",
    ),
    ({"num_generation": 8}, "option-misspelt", "error"),
    ({"max_completion_lenght": 8}, "option-misspelt", "error"),
    ({"evaluation_strategy": "no"}, "option-gone", "error"),
    ({"accelerator_config": {"even_batches": False}}, "batch-uneven", "warning"),
    ({"learning_rate": "small"}, "option-value", "error"),
    ({"ddp_timeout": 30}, "timeout-short", "warning"),
    ({"vllm_gpu_memory_utilization": 0.9, "vllm_enable_sleep_mode": False}, "memory-together", "error"),
    ({"model_name_or_path": "meta-llama/Llama-3.1-70B"}, "memory-training", "error"),
]
NOW = {"trl": "1.16.0", "transformers": "5.23.0"}


def test_a_correct_config_has_no_findings(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, NOW, grpo_yaml=TRL, acc_yaml=ACCELERATE)) == []
    assert (
        bad(
            writer.findings(
                80,
                NOW,
                grpo_yaml=TRL,
                acc_yaml=ACCELERATE
                | {"deepspeed_config": {"deepspeed_config_file": "z.json"}, "mixed_precision": "no"},
                zero3_json=DEEPSPEED,
            )
        )
        == []
    )


@pytest.mark.parametrize(("changes", "id", "severity"), RULES)
def test_each_rule_reports_its_violation(writer: ConfigWriter, changes: dict[str, Any], id: str, severity: str) -> None:
    line = "trl grpo --config grpo.yaml\n"
    found = bad(writer.findings(80, NOW, run_sh=line, grpo_yaml=changed(TRL, changes), acc_yaml=ACCELERATE))
    assert (id, severity) in found, found


def test_a_yaml_alone_does_not_say_how_many_processes_there_are(writer: ConfigWriter) -> None:
    found = writer.findings(80, NOW, grpo_yaml=changed(TRL, {"num_generations": 6}))
    assert bad(found) == [] and ("batch-groups", "unchecked") in [(each.id, each.severity) for each in found]


LAUNCHED = (
    "accelerate launch --num_processes {processes} --config_file acc.yaml train_grpo.py --config grpo.yaml {more}\n"
)


def test_the_command_line_overrides_the_yaml_that_it_names(writer: ConfigWriter) -> None:
    files = {"grpo_yaml": TRL, "acc_yaml": ACCELERATE}
    assert bad(writer.findings(80, NOW, run_sh=LAUNCHED.format(processes=8, more="--output_dir out"), **files)) == []
    found = writer.findings(80, NOW, run_sh=LAUNCHED.format(processes=8, more="--num-generations=7"), **files)
    assert bad(found) == [("batch-groups", "error")]


def test_a_later_removed_option_is_a_warning_unless_the_version_is_known(
    writer: ConfigWriter,
) -> None:
    old = changed(TRL, {"warmup_ratio": 0.1})
    assert bad(writer.findings(80, grpo_yaml=old, acc_yaml=ACCELERATE)) == [("option-gone-later", "warning")]
    then = {"trl": "1.16.0", "transformers": "4.57.6"}
    assert bad(writer.findings(80, then, grpo_yaml=old, acc_yaml=ACCELERATE)) == []
    (gone,) = writer.findings(80, NOW, grpo_yaml=old, acc_yaml=ACCELERATE)[:1]
    assert gone.severity == "warning" and "warmup_steps" in gone.fix
    (gone,) = writer.findings(80, NOW, run_sh="trl grpo --config grpo.yaml\n", grpo_yaml=old, acc_yaml=ACCELERATE)[:1]
    assert gone.severity == "error"


def test_a_yaml_may_have_options_of_a_custom_script(writer: ConfigWriter) -> None:
    found = writer.findings(80, NOW, grpo_yaml=changed(TRL, {"system_prompt": "Think.", "benchmarks": "x"}))
    assert bad(found) == [] and [each.id for each in found].count("option-unknown") == 2


def test_older_versions_of_trl_have_other_batches_and_engines(writer: ConfigWriter) -> None:
    old = {"vllm_device": "auto", "vllm_mode": None, "vllm_enable_sleep_mode": None, "vllm_max_model_length": None}
    then = {"trl": "0.15.2", "transformers": "4.48.3"}
    assert bad(writer.findings(80, then, grpo_yaml=changed(TRL, old), acc_yaml=ACCELERATE)) == []
    found = writer.findings(80, then, grpo_yaml=changed(TRL, old | {"num_generations": 64}), acc_yaml=ACCELERATE)
    assert bad(found) == [("batch-groups", "error")], "4 x 8 processes; accumulation does not count"


def test_custom_scripts_may_have_options_of_their_own(writer: ConfigWriter) -> None:
    line = (
        "torchrun --nproc_per_node=8 my_sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --my_own 3 --output_dir out {}\n"
    )
    assert bad(writer.findings(80, NOW, run_sh=line.format("--per_device_train_batch_size 2"))) == []
    assert bad(writer.findings(80, NOW, run_sh=line.format("--per_device_train_batch_sise 2"))) == [
        ("option-misspelt", "warning")
    ]


def test_the_command_trl(writer: ConfigWriter) -> None:
    line = "trl grpo --config grpo.yaml --num_processes 6\n"
    assert bad(writer.findings(80, NOW, run_sh=line, grpo_yaml=TRL)) == []
    assert ("batch-groups", "error") in bad(
        writer.findings(80, NOW, run_sh=line.replace("6", "7"), grpo_yaml=changed(TRL, {"num_generations": 16}))
    )


def test_missing_files_are_reported(writer: ConfigWriter) -> None:
    found = writer.findings(
        80, NOW, run_sh="accelerate launch --config_file acc.yaml train_grpo.py --config g.yaml --output_dir o\n"
    )
    assert [each.id for each in found].count("file-missing") == 2 and bad(found) == []


# ---------------------------------------------------------------- accelerate

ACCELERATE_RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"distributed_type": None}, "accelerate-type", "error"),
    ({"distributed_type": "DEEPSPED"}, "accelerate-type", "error"),
    ({"distributed_type": "NO"}, "accelerate-type", "warning"),
    ({"distributed_type": "MULTI_GPU"}, "accelerate-section", "warning"),
    ({"num_machines": 3, "main_process_ip": "head"}, "accelerate-processes", "error"),
    ({"num_machines": 2}, "accelerate-address", "error"),
    ({"num_machines": 2, "main_process_ip": "127.0.0.1"}, "accelerate-address", "error"),
    ({"gpu_ids": "0,1"}, "accelerate-processes", "warning"),
    ({"deepspeed_config.deepspeed_config_file": "z.json"}, "accelerate-deepspeed-file", "error"),
    ({"deepspeed_config.zero_stage": 2}, "accelerate-zero3", "warning"),
    (
        {"deepspeed_config.zero_stage": 2, "deepspeed_config.offload_param_device": "cpu"},
        "deepspeed-offload",
        "warning",
    ),
    ({"deepspeed_config.zero3_save_16bit_model": False}, "zero3-save", "warning"),
    ({"fsdp_config": {"fsdp_version": 1}}, "accelerate-section", "warning"),
    ({"numprocesses": 8}, "option-misspelt", "error"),
    ({"deepspeed_config.zero3_init_flags": True}, "option-misspelt", "warning"),
]
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "id", "severity"), ACCELERATE_RULES)
def test_rules_of_accelerate(writer: ConfigWriter, changes: dict[str, Any], id: str, severity: str) -> None:
    assert bad(writer.findings(acc_yaml=ACCELERATE)) == []
    assert (id, severity) in bad(writer.findings(acc_yaml=changed(ACCELERATE, changes)))


def test_rules_of_fsdp(writer: ConfigWriter) -> None:
    assert bad(writer.findings(acc_yaml=FSDP)) == []
    found = bad(writer.findings(acc_yaml=changed(FSDP, {"fsdp_config.fsdp_sync_module_states": False})))
    assert found == [("accelerate-fsdp", "error")]
    found = bad(
        writer.findings(
            acc_yaml=changed(FSDP, {"fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_forward_prefetch": True})
        )
    )
    assert found == [("accelerate-fsdp", "error")]


# ---------------------------------------------------------------- DeepSpeed

Z = "zero_optimization"
ALONE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
}
DEEPSPEED_RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"train_batch_size": 63}, "deepspeed-batch", "error"),
    ({"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, "deepspeed-batch", "error"),
    ({"train_micro_batch_size_per_gpu": "auto"}, "deepspeed-auto", "warning"),
    ({"steps_per_print": "auto"}, "deepspeed-auto", "error"),
    ({"fp16": {"enabled": True}, "bf16.enabled": True}, "deepspeed-precision", "error"),
    ({f"{Z}.stage": 4}, "deepspeed-stage", "error"),
    ({f"{Z}.stage": 2, f"{Z}.offload_param": {"device": "cpu"}}, "deepspeed-offload", "warning"),
    ({f"{Z}.stage": 2, f"{Z}.offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "deepspeed-offload", "error"),
    ({f"{Z}.offload_param": {"device": "nvme"}}, "deepspeed-offload", "error"),
    ({f"{Z}.offload_param": {"device": "disk"}}, "deepspeed-offload", "error"),
    ({f"{Z}.stage": 0, f"{Z}.offload_optimizer": {"device": "cpu"}}, "deepspeed-offload", "warning"),
    ({f"{Z}.stage3_gather_16bit_weights_on_model_save": None}, "zero3-save", "warning"),
    ({"gradient_allreduce_op": "sum"}, "deepspeed-allreduce", "error"),
    ({f"{Z}.overlap_com": True}, "option-misspelt", "error"),
    ({"wallclock_breakdown": True}, "option-misspelt", "warning"),
    ({"elasticity": {"enabled": True}}, "option-gone", "error"),
    ({f"{Z}.mics_shard_size": 8}, "option-gone", "error"),
]


@pytest.mark.parametrize(("changes", "id", "severity"), DEEPSPEED_RULES)
def test_rules_of_deepspeed(writer: ConfigWriter, changes: dict[str, Any], id: str, severity: str) -> None:
    assert bad(writer.findings(ds_json=DEEPSPEED | ALONE)) == []
    found = bad(writer.findings(ds_json=changed(DEEPSPEED | ALONE, changes)))
    assert (id, severity) in found, found


def test_a_key_that_is_set_twice(writer: ConfigWriter) -> None:
    text = '{"train_batch_size": 8,\n "zero_optimization": {"stage": 1,\n "stage": 2}}'
    (found,) = [each for each in writer.findings(ds_json=text) if each.id == "deepspeed-doubled"]
    assert "ds.json:3: zero_optimization.stage is set twice" in found.seen


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"gradient_accumulation_steps": 3},
            "gradient_accumulation_steps is 3, the Trainer's gradient_accumulation_steps is 2",
        ),
        ({"train_micro_batch_size_per_gpu": 8}, "the Trainer's per_device_train_batch_size is 4"),
        ({"train_batch_size": 32}, "x processes is 64"),
        ({"gradient_clipping": 0.5}, "the Trainer's max_grad_norm is 1 (its default)"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is False, bf16 is True"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "the Trainer's learning_rate is 1e-06"),
    ],
)
def test_values_that_differ_between_deepspeed_and_the_trainer(
    writer: ConfigWriter, changes: dict[str, Any], told: str
) -> None:
    yaml = changed(ACCELERATE, {"deepspeed_config": {"deepspeed_config_file": "ds.json"}, "mixed_precision": None})
    found = writer.findings(
        80, NOW, grpo_yaml=changed(TRL, {"bf16": True}), acc_yaml=yaml, ds_json=changed(DEEPSPEED, changes)
    )
    (mismatch,) = [each for each in found if each.id == "deepspeed-mismatch"]
    assert mismatch.severity == "error" and told in mismatch.seen, mismatch.seen
