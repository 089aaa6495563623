"""Values that are unusual for an option mean the same here, or the option is listed."""

from typing import Any

import pytest
from converted_fields import left, value

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.convert.source_command import SourceFramework

OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --advantage_estimator rloo"
OPENRLHF += " --n_samples_per_prompt 8 --remote_rm_url http://h/r"
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d"
VERL += " actor_rollout_ref.model.path=m custom_reward_function.path=r.py actor_rollout_ref.rollout.n=8"
TRL = "--model_name_or_path m --dataset_name d"
COMMANDS = {
    "openrlhf": OPENRLHF, "verl": VERL, "sft": f"trl sft {TRL}", "dpo": f"trl dpo {TRL}", "grpo": f"trl grpo {TRL}",
}  # fmt: skip


def from_options(kind: str, options: str, rows: int | None = 10_240, ranks: int | None = 1) -> ConvertedConfig:
    framework: SourceFramework = kind if kind in ("openrlhf", "verl") else "trl"  # type: ignore[assignment]
    return convert(framework, [f"{COMMANDS[kind]} {options}"], ConversionFacts(rows, ranks))


ACTOR, BUFFER = "actor_rollout_ref.actor", "reward_model.overlong_buffer"


@pytest.mark.parametrize(
    ("kind", "options", "path", "expected"),
    [
        ("verl", f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.0", "loss.kl.coefficient", 0.0),
        ("verl", "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0", "loss.kl.coefficient", 0.0),
        ("verl", f"{ACTOR}.clip_ratio=0 {ACTOR}.clip_ratio_low=null", "loss.clip_low", 0.0),
        ("verl", f"{BUFFER}.enable=True {BUFFER}.len=128 {BUFFER}.penalty_factor=0", "reward.terms",
         [{"kind": "function", "path": "r.py:compute_score", "signature": "verl"},
          {"kind": "length", "soft": 384, "hard": 512, "weight": 0.0}]),
        ("openrlhf", "--eps_clip 0", "loss.clip_low", 0.0),
        ("openrlhf", "--overlong_buffer_len 512 --overlong_penalty_factor 0 --prompt_max_len 8 --generate_max_len 2048",
         "reward.terms",
         [{"kind": "http", "url": "http://h/r", "signature": "openrlhf"},
          {"kind": "length", "soft": 1536, "hard": 2048, "weight": 0.0}]),
        ("dpo", "--adam_beta1 0.0", "trainer.optimizer.betas", [0.0, 0.999]),
        ("dpo", "--save_steps 0", "checkpoint.every", 0),
        ("grpo", "--epsilon 0 --reward_funcs accuracy_reward", "loss.clip_low", 0.0),
        ("sft", "--eval_strategy steps --eval_steps 0 --logging_steps 25", "validation.every", 25),
    ],
)  # fmt: skip
def test_a_zero_is_no_absent_value(kind: str, options: str, path: str, expected: Any) -> None:
    config = from_options(kind, options)
    assert value(config, path) == expected and left(config) == set()


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("verl", "data.train_batch_size=0"),
        ("verl", "trainer.n_gpus_per_node=-8"),
        ("openrlhf", "--rollout_batch_size 0"),
        ("dpo", "--num_train_epochs 0"),
        ("dpo", "--per_device_train_batch_size 2.5"),
        ("grpo", "--num_iterations 0"),
    ],
)
def test_a_value_that_is_no_count_is_listed(kind: str, option: str) -> None:
    assert option.replace("=", " ").split()[0] in left(from_options(kind, option))


OPTIM = f"{ACTOR}.optim"


@pytest.mark.parametrize(
    ("kind", "options", "path", "expected"),
    [
        ("dpo", "--warmup_ratio 1.0 --max_steps 100", "trainer.schedule.warmup_steps", 100),
        ("dpo", "--warmup_steps 1 --max_steps 100", "trainer.schedule.warmup_steps", 1),
        ("dpo", "--warmup_steps 0.1 --max_steps 100", "trainer.schedule.warmup_steps", 10),
        ("dpo", """--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --max_steps 9""",
         "trainer.schedule.final", 0.1),
        ("verl", f"{OPTIM}.lr_warmup_steps=0 {OPTIM}.lr_warmup_steps_ratio=0.1", "trainer.schedule.warmup_steps", None),
        ("verl", f"{OPTIM}.lr_warmup_steps=-1 {OPTIM}.lr_warmup_steps_ratio=0.1 data.train_batch_size=256"
         " trainer.total_training_steps=50", "trainer.schedule.warmup_steps", 5),
        ("openrlhf", "--use_wandb '' --wandb_project p", "tracking", None),
        ("openrlhf", "--use_wandb $KEY --wandb_project p", "tracking", [{"kind": "wandb", "project": "p"}]),
        ("verl", "+custom_reward_function.reward_kwargs.a.b=3 +custom_reward_function.reward_kwargs.a.c=[1,2]",
         "reward.terms", [{"kind": "function", "path": "r.py:compute_score", "signature": "verl",
                           "arguments": {"a": {"b": 3, "c": [1, 2]}}}]),
    ],
)  # fmt: skip
def test_a_value_means_what_it_means_there(kind: str, options: str, path: str, expected: Any) -> None:
    config = from_options(kind, options)
    assert value(config, path) == expected and left(config) == set()


def test_a_reward_model_of_verl_scores_the_last_token() -> None:
    model = "reward_model.enable=True reward_model.model.path=org/rm custom_reward_function.path=null"
    assert value(from_options("verl", model), "reward.terms") == [
        {"kind": "model", "path": "org/rm", "end": "template", "ranks": 8}
    ]


@pytest.mark.parametrize(
    ("kind", "options", "path", "expected"),
    [
        ("openrlhf", "--remote_rm_url http://a/r,http://b/r", "reward.terms",
         [{"kind": "http", "url": "http://a/r", "signature": "openrlhf"}]),
        ("openrlhf", "--input_template hello", "data.template", None),
        ("verl", "'actor_rollout_ref.model.path=${oc.env:MODEL}/m'", "model.path", "MODEL"),
        ("verl", "'data.train_files=[a,${oc.env:DATA}]'", "data.path", "DATA"),
        ("verl", "'trainer.experiment_name=${trainer.experiment_name}'", "name", "gsm8k"),
        ("dpo", "--warmup_ratio 1.5 --max_steps 100", "trainer.schedule.warmup_steps", None),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_listed(kind: str, options: str, path: str, expected: Any) -> None:
    config = from_options(kind, options)
    assert value(config, path) == expected
    assert len(left(config)) == 1 and not config.complete


def test_a_default_that_is_refused_is_missing() -> None:
    config = from_options("verl", "actor_rollout_ref.rollout.n=1")
    without = convert("verl", [VERL.replace(" actor_rollout_ref.rollout.n=8", "")], ConversionFacts(10_240))
    assert "actor_rollout_ref.rollout.n" in left(config)
    assert not without.complete and "1" in without.missing["group_size"]


@pytest.mark.parametrize(("options", "missing"), [("--max_steps 50", set()), ("--num_train_epochs 2", {"steps"})])
def test_packed_rows_are_no_samples(options: str, missing: set[str]) -> None:
    rest = "--max_length 4096 --completion_only_loss True"
    assert set(from_options("sft", f"--packing {rest} {options}").missing) == {"batch_size"} | missing
    assert from_options("sft", f"--packing False {rest} {options}").complete


@pytest.mark.parametrize("turned", [False, True], ids=["newest first", "newest last"])
@pytest.mark.parametrize("other", ["1.0", "0.50"])
def test_of_several_names_of_an_option_one_counts_and_the_others_are_listed(turned: bool, other: str) -> None:
    """verl has both: one is for FSDP, one for Megatron."""
    given = ["actor_rollout_ref.actor.grad_clip=0.5", f"actor_rollout_ref.actor.optim.clip_grad={other}"]
    command = " ".join(
        ["python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo", *given[:: -1 if turned else 1]]
    )
    config = convert("verl", [command], ConversionFacts(20_000, 1))
    assert value(config, "trainer.max_grad_norm") == 0.5
    outcomes = {each.name: (each.kind, each.text) for each in config.outcomes}
    text = "with the same value" if other == "0.50" else "and its value is taken: leave one of them out"
    kind = "unneeded" if other == "0.50" else "unsupported"
    assert outcomes["actor_rollout_ref.actor.grad_clip"][0] == "converted"
    assert outcomes["actor_rollout_ref.actor.optim.clip_grad"] == (
        kind, f"actor_rollout_ref.actor.grad_clip is given, too, {text}"
    )  # fmt: skip
