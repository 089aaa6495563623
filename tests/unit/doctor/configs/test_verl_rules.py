"""Every rule for verl, on overrides that violate it and on overrides that do not."""

from typing import Any

import pytest

from tests.unit.doctor.configs.sample_configs import VERL, ConfigWriter, bad, changed, verl

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
DYNAMIC = {f"{A}.use_dynamic_bsz": True, f"{A}.ppo_micro_batch_size_per_gpu": None}
MEGATRON = {
    f"{A}.fsdp_config.param_offload": None,
    f"{A}.fsdp_config.optimizer_offload": None,
    "model_engine": "megatron",
}
RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"data.train_batch_size": 255}, "batch-ranks", "error"),
    ({"data.train_batch_size": 32}, "batch-mini", "error"),
    ({"data.train_batch_size": 288}, "batch-mini", "warning"),
    ({f"{A}.ppo_mini_batch_size": 60, "data.train_batch_size": 240}, "batch-mini-ranks", "error"),
    ({f"{A}.ppo_micro_batch_size_per_gpu": 16}, "batch-micro", "error"),
    ({f"{A}.ppo_micro_batch_size": 8}, "batch-micro-both", "error"),
    ({f"{A}.ppo_micro_batch_size_per_gpu": None}, "batch-micro-missing", "error"),
    ({f"{R}.log_prob_micro_batch_size_per_gpu": None}, "batch-micro-missing", "error"),
    ({f"{A}.use_kl_loss": True}, "batch-micro-missing", "error"),
    ({f"{A}.ppo_micro_batch_size_per_gpu": None, f"{A}.ppo_micro_batch_size": 32}, "batch-micro-old", "warning"),
    ({**DYNAMIC, f"{A}.ppo_max_token_len_per_gpu": 1024}, "length-budget", "error"),
    ({f"{R}.n": 1}, "algorithm-group", "warning"),
    ({"algorithm.adv_estimator": None}, "algorithm-critic", "warning"),
    ({"algorithm.use_kl_in_reward": True, f"{A}.use_kl_loss": True}, "algorithm-kl", "warning"),
    ({f"{R}.mode": "sync"}, "rollout-mode", "error"),
    ({f"{R}.name": None}, "rollout-name", "error"),
    ({f"{R}.val_kwargs.do_sample": True, f"{R}.temperature": 0}, "rollout-sampling", "error"),
    ({f"{R}.tensor_model_parallel_size": 3}, "parallel-engine", "error"),
    ({f"{R}.pipeline_model_parallel_size": 2}, "parallel-engine", "error"),
    ({f"{R}.expert_parallel_size": 4}, "parallel-engine", "error"),
    (
        {f"{A}.ulysses_sequence_parallel_size": 2, "actor_rollout_ref.model.use_remove_padding": False},
        "parallel-ulysses",
        "error",
    ),
    ({f"{A}.ulysses_sequence_parallel_size": 3}, "parallel-sizes", "error"),
    ({f"{A}.fsdp_config.fsdp_size": 3}, "parallel-sizes", "error"),
    ({f"{A}.ulysses_sequence_parallel_size": 8}, "parallel-heads", "error"),
    ({f"{R}.max_model_len": 1536}, "length-engine", "warning"),
    ({f"{R}.enable_chunked_prefill": False, f"{R}.max_num_batched_tokens": 1024}, "length-prefill", "error"),
    ({f"{R}.gpu_memory_utilization": 60}, "engine-memory", "error"),
    ({"actor_rollout_ref.nccl_timeout": 3600}, "timeout-unread", "warning"),
    ({f"{A}.megatron.tensor_model_parallel_size": 2}, "option-other-engine", "error"),
    ({"data.train_batchsize": 256}, "option-misspelt", "error"),
    ({f"{R}.update_weights_bucket_megabytes": 512}, "option-gone", "error"),
    ({"trainer.total_epochs": "many"}, "option-value", "error"),
    ({"actor_rollout_ref.model.path": "Qwen/Qwen2.5-72B-Instruct"}, "memory-training", "error"),
]


def test_correct_overrides_have_no_findings(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, run_sh=verl(VERL))) == []


@pytest.mark.parametrize(("changes", "id", "severity"), RULES)
def test_each_rule_reports_its_violation(writer: ConfigWriter, changes: dict[str, Any], id: str, severity: str) -> None:
    found = bad(writer.findings(80, {"verl": "0.9.1"}, run_sh=verl(changed(VERL, changes))))
    assert (id, severity) in found, found


def test_a_yaml_has_the_same_findings(writer: ConfigWriter) -> None:
    tree: dict[str, Any] = {}
    for name, value in VERL.items():
        inside = tree
        for part in name.split(".")[:-1]:
            inside = inside.setdefault(part, {})
        inside[name.split(".")[-1]] = value
    assert bad(writer.findings(80, ppo_yaml=tree)) == []
    tree["data"]["train_batch_size"] = 255
    (found,) = [each for each in writer.findings(80, ppo_yaml=tree) if each.id == "batch-ranks"]
    line = (writer.folder / "ppo.yaml").read_text().splitlines().index("  train_batch_size: 255") + 1
    assert f"ppo.yaml:{line}: " in found.seen


def test_parallel_sizes_of_megatron(writer: ConfigWriter) -> None:
    sizes = {f"{A}.megatron.tensor_model_parallel_size": 2, f"{A}.megatron.pipeline_model_parallel_size": 2}
    assert bad(writer.findings(80, run_sh=verl(changed(VERL, MEGATRON | sizes)))) == []
    sizes |= {f"{A}.megatron.context_parallel_size": 3}
    assert ("parallel-sizes", "error") in bad(writer.findings(80, run_sh=verl(changed(VERL, MEGATRON | sizes))))


def test_added_keys_are_accepted_and_near_misses_reported(writer: ConfigWriter) -> None:
    assert bad(writer.findings(80, run_sh=verl(VERL, more="+data.my_own=3 "))) == []
    found = writer.findings(80, run_sh=verl(VERL, more=f"+{R}.gpu_memory_utilisation=0.5 "))
    assert bad(found) == [("option-misspelt", "warning")]


def test_interpolations_are_resolved(writer: ConfigWriter) -> None:
    text = (
        verl(changed(VERL, {f"{R}.max_model_len": "${data.max_response_length}"}))
        .replace('"${', "'${")
        .replace('h}"', "h}'")
    )
    assert ("length-engine", "warning") in bad(writer.findings(80, run_sh=text))


def test_a_word_that_is_not_an_override(writer: ConfigWriter) -> None:
    assert ("option-unknown", "error") in bad(writer.findings(80, run_sh=verl(VERL, more="trainer.nnodes ")))


def test_only_older_versions_apply_nccl_timeout(writer: ConfigWriter) -> None:
    text = verl(changed(VERL, {"actor_rollout_ref.nccl_timeout": 3600}))
    found = writer.findings(80, {"verl": "0.6.1"}, run_sh=text)
    assert [each.severity for each in found if each.id.startswith("timeout")] == ["note"]
    as_it_is = verl(changed(VERL, {"actor_rollout_ref.nccl_timeout": 600}))
    assert bad(writer.findings(80, {"verl": "0.9.1"}, run_sh=as_it_is)) == [], "PyTorch's own"


def test_exports_on_several_nodes(writer: ConfigWriter) -> None:
    two = changed(VERL, {"trainer.nnodes": 2})
    before = "export NCCL_IB_HCA=mlx5"
    assert ("environment-driver-only", "warning") in bad(writer.findings(80, run_sh=verl(two, before)))
    given = "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_IB_HCA=mlx5 "
    assert bad(writer.findings(80, run_sh=verl(two, before, more=given))) == []
    assert bad(writer.findings(80, run_sh=verl(VERL, before))) == [], "one node"


def test_another_program_is_judged_by_the_options_that_it_shares(writer: ConfigWriter) -> None:
    text = verl(changed(VERL, {"data.gen_batch_size_of_mine": 3}), program="recipe.dapo.main_dapo")
    found = writer.findings(80, run_sh=text)
    assert bad(found) == [] and "program-unknown" in [each.id for each in found]


def test_branches_that_may_not_run_change_nothing(writer: ConfigWriter) -> None:
    before = """N=${N:-8}
DEVICE=$(python -c 'print(1)')
case "${DEVICE}" in
    npu)
        N=7
        ;;
    *)
        ;;
esac
if [ "$DEVICE" = x ]; then
    N=3
fi
[ "$DEVICE" = y ] && N=5 || N=6"""
    assert bad(writer.findings(80, run_sh=verl(changed(VERL, {"trainer.n_gpus_per_node": "${N}"}), before))) == []
