"""Which models share GPUs after a conversion, and that the placement of the converted run is possible."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.placement.bundles import make_bundles, total_gpus
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.models.model_facts import ModelFacts
from lockstep.run.planning.resources import HostResources
from lockstep.run.planning.run_plan import RunPlan, make_plan

SOURCES = sorted((Path(__file__).parent / "sources").iterdir())
MODEL = ModelFacts(
    parameters=1_000_000, layers=2, hidden=128, vocabulary=64, kv_heads=4, head_dim=32, context=1 << 20,
    dtype="float32", largest_layer=450_000, root=100_000,
)  # fmt: skip
HOST = HostResources(cores=64, memory=1 << 40, shared_memory=1 << 34, device="cuda", gpus=64)
TRAIN = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --n_samples_per_prompt 8 --bf16 "
    "--actor_num_gpus_per_node 4 --ref_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2"
)
GRPO = f"{TRAIN} --advantage_estimator group_norm --remote_rm_url r.py"
PPO = f"{TRAIN} --critic_num_gpus_per_node 4 --reward_num_gpus_per_node 4 --reward_pretrain rm"


def converted(command: str) -> ConvertedConfig:
    return convert("openrlhf", [command], ConversionFacts(rows=10_240))


def planned(config: ConvertedConfig) -> tuple[RunConfig, RunPlan]:
    """The config and the plan of its processes. Raises InfeasibleError or PlacementError if they are impossible."""
    made = check_config(dict(config.values), "test")
    models = {role.name: MODEL for role in (*made.train_roles, *made.serve_roles)}
    return made, make_plan(made, MODEL, HOST, models)


def gpus(config: ConvertedConfig) -> int:
    """The GPUs that all processes of the run need together. Raises PlacementError if the placement is impossible."""
    made, plan = planned(config)
    assert make_bundles(plan.wanted, made.placement)
    return total_gpus(plan.wanted, made.placement)


@pytest.mark.parametrize(
    ("command", "colocate", "number"),
    [
        (GRPO, None, 12),  # policy, reference, two engines of two
        (f"{GRPO} --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep", "all", 4),
        (f"{GRPO} --colocate_actor_ref", "actor_ref", 8),
        (f"{GRPO} --colocate_actor_ref --ref_reward_offload", "actor_ref", 8),
        (f"{GRPO} --colocate_actor_ref --init_kl_coef 0", None, 8),  # no reference
        (f"{GRPO} --colocate_actor_ref --lora_rank 8", None, 8),  # the reference is the policy without its adapter
        (f"{GRPO} --colocate_all_models --async_train", None, 8),  # engines apart, the reference on the policy's ranks
        (f"{GRPO} --colocate_all_models --async_train --ref_reward_offload", "actor_ref", 8),
        (f"{GRPO} --colocate_actor_ref --async_train", "actor_ref", 8),
        (PPO, None, 20),
        (f"{PPO} --colocate_actor_ref --colocate_critic_reward", ["actor_ref", "critic_reward"], 12),
        (f"{PPO} --colocate_all_models", "all", 4),
        (f"{PPO} --colocate_all_models --async_train", ["policy", "critic", "reward_model"], 8),
        (f"{PPO} --critic_num_gpus_per_node 2 --colocate_critic_reward", None, 18),  # as OpenRLHF refuses it
    ],
)
def test_models_that_share_gpus_in_openrlhf_share_them_here(command: str, colocate: Any, number: int) -> None:
    config = converted(command)
    assert config.values.get("placement", {}).get("colocate") == colocate
    assert gpus(config) == number


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_processes_of_every_conversion_can_be_placed(path: Path) -> None:
    framework: Any = path.name.partition("_")[0]
    config = convert(framework, [str(path)], ConversionFacts(20_000, 8))
    made, plan = planned(config)
    assert sum(each.role == "policy" for each in plan.processes) == made.trainer.ranks
    if made.cluster.kind == "ray":
        assert gpus(config) >= made.trainer.ranks


def test_both_generations_of_names_share_alike() -> None:
    new = (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d "
        "--rollout.n_samples_per_prompt 8 --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 "
        "--reward.remote_url r.py --algo.advantage.estimator group_norm --vllm.num_engines 2 "
        "--vllm.tensor_parallel_size 2 --train.colocate_actor_ref --train.async_enable --data.max_len 2048 "
        "--rollout.max_new_tokens 1024"
    )
    config = converted(new)
    assert config.values["placement"]["colocate"] == "actor_ref" and config.values["reference"] == {"ranks": 4}
    assert config.values["rollout"]["max_staleness"] == 1 and gpus(config) == 8


def test_a_reference_without_offloading_stays_on_the_ranks_of_the_policy() -> None:
    config = converted(f"{GRPO} --colocate_all_models")
    assert "reference" not in config.values
    offloaded = converted(f"{GRPO} --colocate_all_models --ref_reward_offload")
    assert offloaded.values["reference"] == {"ranks": 4} and gpus(offloaded) == 4
    assert not offloaded.of_kind("unsupported", "unknown")
