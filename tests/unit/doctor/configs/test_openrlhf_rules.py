"""Every rule for OpenRLHF, on a command line that violates it and on one that does not."""

from typing import Any

import pytest

from tests.unit.doctor.configs.sample_configs import FLAT, OPENRLHF, ConfigWriter, bad, changed, openrlhf

RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"vllm.num_engines": 3}, "placement-colocate", "error"),
    ({"ref.num_gpus_per_node": 4}, "placement-colocate", "error"),
    ({"train.async_enable": True}, "engine-sleep", "error"),
    ({"ds.ring_attn_size": 3, "train.batch_size": None}, "parallel-sizes", "error"),
    ({"train.batch_size": 100}, "batch-accumulation", "error"),
    ({"rollout.micro_batch_size": 128}, "batch-ranks", "error"),
    ({"rollout.batch_size": 129, "rollout.n_samples_per_prompt": 2, "train.batch_size": 32}, "batch-uneven", "warning"),
    ({"train.batch_size": 1024}, "batch-train", "warning"),
    ({"train.batch_size": 384}, "batch-train", "warning"),
    ({"rollout.vllm_generate_batch_size": 256}, "batch-oversampling", "error"),
    ({"rollout.n_samples_per_prompt": 1}, "algorithm-group", "error"),
    ({"reward.remote_url": None}, "algorithm-reward", "error"),
    ({"train.partial_rollout_enable": True}, "algorithm-async", "error"),
    ({"algo.dynamic_filtering_enable": True, "rollout.n_samples_per_prompt": 1}, "algorithm-group", "error"),
    ({"eval.dataset": "d", "reward.remote_url": None, "reward.model_name_or_path": "m"}, "algorithm-reward", "error"),
    ({"ds.packing_samples": True, "vllm.num_engines": 0}, "engine-missing", "error"),
    ({"vllm.num_engines": 0}, "zero3-generation", "warning"),
    ({"vllm.gpu_memory_utilization": 60}, "engine-memory", "error"),
    ({"vllm.sync_backend": "gloo"}, "engine-sync", "warning"),
    ({"rollout.max_new_tokens": 2048}, "length-engine", "error"),
    ({"train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 1024}, "length-budget", "warning"),
    ({"vllm.tensor_parallel_size": 8, "vllm.num_engines": 1}, "parallel-heads", "error"),
    ({"vllm.enable_sleep": None, "vllm.gpu_memory_utilization": 0.95}, "memory-together", "error"),
    ({"algo.advantage.estimator": "grpo"}, "option-value", "error"),
    ({"train.batch_size": "many"}, "option-value", "error"),
    ({"train.batch_sise": 128}, "option-misspelt", "error"),
    ({"frobnicate": 1}, "option-unknown", "error"),
    ({"bf16": True}, "option-gone", "error"),
]


def test_a_correct_command_has_no_findings(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, run_sh=openrlhf(OPENRLHF))) == []


@pytest.mark.parametrize(("changes", "id", "severity"), RULES)
def test_each_rule_reports_its_violation(writer: ConfigWriter, changes: dict[str, Any], id: str, severity: str) -> None:
    found = bad(writer.findings(80, run_sh=openrlhf(changed(OPENRLHF, changes))))
    assert (id, severity) in found, found


def test_every_finding_names_the_line_of_the_option(writer: ConfigWriter) -> None:
    text = openrlhf(changed(OPENRLHF, {"train.batch_size": 100}))
    (found,) = [each for each in writer.findings(80, run_sh=text) if each.id == "batch-accumulation"]
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "--train.batch_size" in each)
    assert f"run.sh:{line}: " in found.seen and "100" in found.seen and "8 data-parallel ranks" in found.seen
    assert found.fix and found.source.startswith("https://")


def test_an_older_command_line_is_judged_by_an_older_version(writer: ConfigWriter) -> None:
    report = writer.report(80, run_sh=openrlhf(FLAT))
    assert bad(report.findings) == [("version-old", "warning")]
    text = " ".join(each.seen for each in report.findings)
    assert "0.10.0" in text and "--actor_num_nodes, now actor.num_nodes" in text


def test_with_a_newer_version_installed_the_old_names_are_errors(writer: ConfigWriter) -> None:
    found = writer.findings(80, {"openrlhf": "0.11.0"}, run_sh=openrlhf(FLAT))
    (gone,) = [each for each in found if each.id == "option-gone" and "--colocate_all_models" in each.seen]
    assert gone.severity == "error" and gone.fix == "write train.colocate_all"


def test_rules_also_apply_to_the_old_names(writer: ConfigWriter) -> None:
    found = bad(writer.findings(80, run_sh=openrlhf(changed(FLAT, {"vllm_num_engines": 2, "train_batch_size": 100}))))
    assert ("placement-colocate", "error") in found and ("batch-accumulation", "error") in found


def test_an_abbreviation_that_argparse_accepts_is_accepted(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, run_sh=openrlhf(changed(OPENRLHF, {"train.max_ep": 2})))) == []


def test_a_value_without_an_option_is_reported(writer: ConfigWriter) -> None:
    text = openrlhf(OPENRLHF).replace("--ds.zero_stage 3", "--ds.zero_stage 3 4")
    assert ("option-unknown", "error") in bad(writer.findings(80, run_sh=text))


def test_variables_that_the_script_does_not_set_are_not_judged(writer: ConfigWriter) -> None:
    text = openrlhf(changed(OPENRLHF, {"train.batch_size": "$TBS", "actor.model_name_or_path": "$MODEL"}))
    found = writer.findings(80, run_sh=text)
    assert bad(found) == [] and ("memory-model", "unchecked") in [(each.id, each.severity) for each in found]


# ---------------------------------------------------------------- environment and time-outs


def test_exports_that_workers_do_not_get(writer: ConfigWriter) -> None:
    found = writer.findings(80, run_sh=openrlhf(OPENRLHF, "export NCCL_SOCKET_IFNAME=eth0\nexport EDITOR=vi"))
    (lost,) = [each for each in found if each.id == "environment-driver-only"]
    assert '"NCCL_SOCKET_IFNAME": "eth0"' in lost.fix and "EDITOR" not in lost.seen


def test_workers_get_variables_of_the_runtime_environment(writer: ConfigWriter) -> None:
    around = """ray job submit --runtime-env-json='{"env_vars": {"NCCL_SOCKET_IFNAME": "eth0"}}' -- """
    text = openrlhf(OPENRLHF, "export NCCL_SOCKET_IFNAME=eth0", around)
    assert bad(writer.findings(80, run_sh=text)) == []
    assert bad(writer.findings(80, run_sh=openrlhf(OPENRLHF, "export NCCL_SOCKET_IFNAME=eth0", ""))) == [], "no Ray job"


@pytest.mark.parametrize("name", ["NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "DEEPSPEED_TIMEOUT"])
def test_timeouts_that_nothing_reads(writer: ConfigWriter, name: str) -> None:
    found = writer.findings(80, run_sh=openrlhf(OPENRLHF, f"export {name}=3600"))
    assert ("timeout-unread", "warning") in bad(found)


# ---------------------------------------------------------------- memory


def test_a_model_that_is_too_large_for_any_gpu(writer: ConfigWriter) -> None:
    large = {"actor.model_name_or_path": "meta-llama/Llama-3.1-70B-Instruct", "ds.zero_stage": 2}
    assert ("memory-training", "error") in bad(writer.findings(80, run_sh=openrlhf(changed(OPENRLHF, large))))
    offloaded = large | {
        "ds.zero_stage": 3,
        "ds.adam_offload": True,
        "vllm.tensor_parallel_size": 4,
        "vllm.num_engines": 2,
    }
    assert bad(writer.findings(80, run_sh=openrlhf(changed(OPENRLHF, offloaded)))) == []


def test_an_engine_whose_weights_do_not_fit(writer: ConfigWriter) -> None:
    large = {"actor.model_name_or_path": "Qwen/Qwen2.5-72B", "vllm.tensor_parallel_size": 1, "vllm.num_engines": 8}
    assert ("memory-engine", "error") in bad(writer.findings(80, run_sh=openrlhf(changed(OPENRLHF, large))))


def test_without_gpu_memory_the_required_size_is_reported(writer: ConfigWriter) -> None:
    found = [each for each in writer.findings(run_sh=openrlhf(OPENRLHF)) if each.id == "memory-training"]
    assert [each.severity for each in found] == ["note"] and "GPUs from 24 GiB are large enough" in found[0].seen


# ---------------------------------------------------------------- other programs


SFT = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.max_len 2048 \\
   --train.batch_size {batch} \\
   --train.micro_batch_size 2 \\
   --ds.zero_stage 2
EOF
torchrun --nproc_per_node 8 -m $training_commands
"""


def test_a_here_document_with_the_options(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, {"openrlhf": "0.11.2"}, run_sh=SFT.format(batch=256))) == []
    found = writer.findings(80, {"openrlhf": "0.11.2"}, run_sh=SFT.format(batch=250))
    assert bad(found) == [("batch-accumulation", "error")] and "run.sh:5: " in found[0].seen


def test_variables_are_judged_as_the_environment_lint_does(writer: ConfigWriter) -> None:
    text = openrlhf(OPENRLHF, "export NCCL_DEBUGG=INFO\nexport MY_OWN=1", "")
    found = writer.findings(80, run_sh=text)
    assert bad(found) == [("env-misspelt", "error")] and "run.sh:2: " in found[0].seen
