"""verl's other engines, Megatron and SGLang, and where its models are."""

from typing import Any

import pytest
from converted_fields import left, value

from lockstep.config.loader import check_config
from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert

VERL = "python3 -m verl.trainer.main_ppo data.train_files=d actor_rollout_ref.model.path=m"
GRPO = f"{VERL} algorithm.adv_estimator=grpo custom_reward_function.path=r.py actor_rollout_ref.rollout.n=8"
ACTOR = "actor_rollout_ref.actor"


def converted(options: str, command: str = GRPO) -> ConvertedConfig:
    return convert("verl", [f"{command} {options}"], ConversionFacts(rows=10_240))


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        (f"--config-name=ppo_megatron_trainer.yaml {ACTOR}.strategy=megatron critic.strategy=megatron", set()),
        (f"model_engine=megatron {ACTOR}.megatron.tensor_model_parallel_size=4", set()),
        (f"{ACTOR}.megatron.pipeline_model_parallel_size=2 {ACTOR}.megatron.expert_model_parallel_size=8", set()),
        (f"{ACTOR}.megatron.context_parallel_size=2", {f"{ACTOR}.megatron.context_parallel_size"}),
        (f"{ACTOR}.megatron.context_parallel_size=1", set()),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4", set()),
        (f"{ACTOR}.megatron.use_mbridge=True {ACTOR}.megatron.dist_checkpointing_path=/c", set()),
        (f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full", set()),
        (f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3",
         {f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage"}),
        ("actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
         set()),
        ("actor_rollout_ref.rollout.name=trtllm actor_rollout_ref.rollout.multi_stage_wake_up=True", set()),
        ("actor_rollout_ref.hybrid_engine=True", set()),
    ],
)  # fmt: skip
def test_how_other_engines_divide_a_model_needs_no_counterpart(options: str, listed: set[str]) -> None:
    assert left(converted(options)) == listed


@pytest.mark.parametrize(
    ("options", "path", "expected"),
    [
        (f"{ACTOR}.megatron.param_offload=True", "trainer.offload.parameters", True),
        (f"{ACTOR}.megatron.optimizer_offload=True", "trainer.offload.optimizer", True),
        (f"{ACTOR}.optim.lr_decay_style=cosine {ACTOR}.optim.lr=2e-6 {ACTOR}.optim.min_lr=2e-7", "trainer.schedule",
         {"kind": "cosine", "final": 0.1}),
        (f"{ACTOR}.optim.min_lr=0.0", "trainer.schedule", None),
        ("actor_rollout_ref.rollout.name=sglang", "rollout.engine.kind", "vllm"),
        ("actor_rollout_ref.hybrid_engine=False", "placement.colocate", None),
        ("", "placement.colocate", "all"),
    ],
)  # fmt: skip
def test_options_of_other_engines_with_counterparts(options: str, path: str, expected: Any) -> None:
    config = converted(options)
    assert value(config, path) == expected and left(config) == set()


def test_offloading_of_the_critic_in_all_spellings() -> None:
    for section in ("critic.model.fsdp_config", "critic.fsdp_config", "critic.fsdp", "critic.megatron"):
        config = converted(
            f"{section}.param_offload=True {section}.optimizer_offload=True", f"{VERL} custom_reward_function.path=r.py"
        )
        assert config.recipe == "ppo"
        assert value(config, "critic.trainer.offload") == {"parameters": True, "optimizer": True}


def test_a_reward_model_is_on_the_shared_gpus_or_on_its_own() -> None:
    model = "reward_model.enable=True reward_model.model.path=rm custom_reward_function.path=null"
    shared = converted(model)
    assert value(shared, "reward.terms")[0]["ranks"] == 8 and value(shared, "placement.colocate") == "all"
    pool = "reward_model.enable_resource_pool=True reward_model.nnodes=1 reward_model.n_gpus_per_node=2"
    own = converted(f"{model} {pool}")
    assert value(own, "reward.terms")[0]["ranks"] == 2
    assert value(own, "placement.colocate") == ["policy", "rollout"]
    assert value(own, "placement.reward_model") == {"nodes": 1, "gpus_per_node": 2}
    critic = converted(f"{model} {pool}", VERL)
    assert value(critic, "placement.colocate") == ["policy", "rollout", "critic"]
    for each in (shared, own, critic):
        assert left(each) == set() and check_config(dict(each.values), "test")
    assert left(converted(pool)) == set()  # without a reward model


def test_an_offloaded_reference_takes_turns_with_the_others() -> None:
    offload = "actor_rollout_ref.ref.fsdp_config.param_offload=True"
    config = converted(f"{offload} {ACTOR}.use_kl_loss=True")
    assert value(config, "reference") == {"ranks": 8} and value(config, "placement.colocate") == "all"
    for options in (offload, f"{offload} {ACTOR}.use_kl_loss=True actor_rollout_ref.model.lora_rank=8"):
        alone = converted(options)
        assert value(alone, "reference") is None and left(alone) == set()


def test_one_step_off_policy_has_engines_of_its_own() -> None:
    program = GRPO.replace("verl.trainer.main_ppo", "recipe.one_step_off_policy.main_ppo")
    config = converted(
        "actor_rollout_ref.hybrid_engine=False rollout.nnodes=1 rollout.n_gpus_per_node=2 trainer.n_gpus_per_node=6",
        program,
    )
    assert value(config, "rollout.max_staleness") == 1 and value(config, "placement.rollout") == {
        "nodes": 1, "gpus_per_node": 2,
    }  # fmt: skip
    assert value(config, "trainer.ranks") == 6 and left(config) == set()
