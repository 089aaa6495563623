"""Scripts and configs of other frameworks become configs that load and mean the same. The expected numbers are worked
out by hand from what each framework documents about its options."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from converted_fields import left, values

from lockstep.config.loader import load_config
from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.convert.errors import NotConvertible
from lockstep.convert.source_command import SourceFramework, read_source
from lockstep.doctor.configs.config_settings import ConfigNotReadable

SOURCES = sorted((Path(__file__).parent / "sources").iterdir())
ROWS = ConversionFacts(rows=20_000)


def framework_of(path: Path) -> SourceFramework:
    return path.name.partition("_")[0]  # type: ignore[return-value]


def converted(name: str, facts: ConversionFacts = ROWS) -> ConvertedConfig:
    path = Path(__file__).parent / "sources" / name
    return convert(framework_of(path), [str(path)], facts)


def from_command(framework: SourceFramework, text: str, rows: int | None = None, ranks: int | None = None) -> Any:
    return convert(framework, [text], ConversionFacts(rows, ranks))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("facts", [ConversionFacts(), ConversionFacts(20_000, 4)], ids=["alone", "facts"])
def test_every_conversion_loads_and_says_of_each_option_what_became_of_it(
    path: Path, facts: ConversionFacts, tmp_path: Path
) -> None:
    config = convert(framework_of(path), [str(path)], facts)
    out = tmp_path / "run.yaml"
    out.write_text(config.text)
    assert load_config(out).recipe == config.recipe
    given = list(read_source(framework_of(path), [str(path)]).settings)
    names = [each.name.replace(" --", ":").removeprefix("--") for each in config.outcomes]
    assert sorted(names) == sorted(each.name.removeprefix("--") for each in given if not each.removed)
    for each in config.outcomes:
        assert bool(each.fields) == (each.kind == "converted") and bool(each.text) != bool(each.fields), each


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_secret_is_repeated(path: Path) -> None:
    config = convert(framework_of(path), [str(path)], ROWS)
    everything = f"{config.text} {config.outcomes} {config.missing} {config.notes} {config.values}"
    assert not any(secret in everything for secret in ("89abcdef", "01234567", "hf_0123"))


def test_openrlhf_grpo() -> None:
    config = converted("openrlhf_grpo.sh")
    assert config.complete and config.recipe == "grpo"
    expected = {
        "name": "grpo-7b",
        "folder": "./out",
        "seed": 7,
        "steps": 468,  # 3 episodes of 20,000 // 128 batches of prompts
        "prompts_per_step": 128,
        "group_size": 8,
        "minibatch_size": 512,  # samples in both
        "model.path": "org/base-7b",
        "model.dtype": "bfloat16",
        "model.max_length": 4096,
        "rollout.sampling.max_tokens": 3072,
        "token_budget": 8192,  # 2 sequences of 4,096 tokens
        "trainer.ranks": 8,
        "trainer.optimizer.lr": 5e-7,
        "trainer.optimizer.betas": [0.9, 0.95],
        "trainer.optimizer.weight_decay": 0.01,
        "trainer.schedule": {"kind": "cosine", "final": 0.1, "warmup_steps": 47},  # 5% of 468 x 2 optimizer steps
        "trainer.offload": {"parameters": True, "optimizer": True},
        "advantage": {"kind": "grpo", "epsilon": 1e-9},
        "filter_groups.enable": True,
        "loss.kl": {"coefficient": 0.001, "where": "loss", "estimator": "k3"},
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.old_logprobs": "trainer",
        "rollout.engine.count": 4,
        "rollout.engine.enable_prefix_caching": False,
        "placement.colocate": "all",
        "cluster": {"kind": "ray", "env": {"NCCL_DEBUG": "WARN"}},
        "data.answer_column": "answer",
        "data.chat": True,
        "tracking": [{"kind": "wandb", "project": "grpo", "entity": "team"}],
        "checkpoint": {"every": 20, "keep_last": 4},
    }
    assert values(config, *expected) == expected
    reward = {"kind": "function", "path": "./rewards/answer.py:reward_func", "signature": "openrlhf"}
    assert values(config, "reward.terms")["reward.terms"] == [reward]


def test_openrlhf_sft() -> None:
    config = converted("openrlhf_sft.sh")
    assert left(config) == {"--output_key"} and not config.missing
    expected = {
        "steps": 156,  # 2 epochs of 20,000 // 256
        "batch_size": 256,
        "trainer.ranks": 4,
        "token_budget": 8192,
        "trainer.reshard_after_forward": False,
        "trainer.schedule": {"kind": "cosine", "final": 0.1, "warmup_steps": 5},  # 3% of 156, rounded up
        "model.adapter": {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05},
        "data.mixture": [{"path": "org/instructions", "weight": 0.7}, {"path": "org/code", "weight": 0.3}],
        "data.template": "Question: {prompt}\nAnswer: ",
        "data.limit": 500_000,
        "checkpoint.every": 0,
        "seed": 42,
    }
    assert values(config, *expected) == expected


def test_openrlhf_pairs_and_reward_models() -> None:
    pairs = converted("openrlhf_dpo.sh", ConversionFacts(20_000, 8))
    assert left(pairs) == {"--ds.adam_offload", "--ds.ring_attn_size"} and not pairs.missing
    expected = {"type": ["sigmoid", "sft"], "weights": [1.0, 0.2], "beta": 0.1, "label_smoothing": 0.1}
    assert pairs.recipe == "preference" and values(pairs, "loss")["loss"] == expected
    assert values(pairs, "steps", "data.overlong", "token_budget") == {
        "steps": 156, "data.overlong": "truncate", "token_budget": 4096,
    }  # fmt: skip
    scores = converted("openrlhf_rm.sh")
    assert scores.complete and scores.recipe == "reward"
    expected = {
        "loss.use_margin": True,
        "folder": "/models",
        "trainer.ranks": 2,
        "trainer.optimizer.lr": 9e-6,
        "validation": {"data": {"path": "org/pairs-test", "split": "test", "overlong": "truncate"}, "every": 50},
    }
    assert values(scores, *expected) == expected


def test_verl_grpo() -> None:
    config = converted("verl_grpo.sh")
    assert config.complete
    expected = {
        "steps": 156,  # 4 epochs of 20,000 // 512
        "prompts_per_step": 512,
        "group_size": 8,
        "minibatch_size": 1024,  # 128 prompts of 8 completions
        "trainer.schedule.warmup_steps": 20,  # 5 steps of 4 optimizer steps
        "token_budget": 4 * 3072,
        "model.max_length": 3072,
        "rollout.sampling.max_tokens": 2048,
        "rollout.engine.count": 8,  # 16 GPUs, 2 for each engine
        "rollout.engine.gpu_memory_utilization": 0.6,
        "trainer.ranks": 16,
        "placement.policy": {"nodes": 2, "gpus_per_node": 8},
        "loss.kl": {"coefficient": 0.001, "where": "loss", "estimator": "k3"},
        "loss.dual_clip": 3.0,
        "trainer.optimizer.weight_decay": 0.01,
        "advantage": {"kind": "grpo", "epsilon": 1e-6},
        "data.mixture": [{"path": "/data/a.parquet"}, {"path": "/data/b.parquet"}],
        "evaluation.sampling": {"temperature": 0.0, "max_tokens": 2048},
        "evaluation.every": 5,
        "reward.terms": [{"kind": "function", "path": "rewards/math.py:score", "signature": "verl"}],
        "tracking": [{"kind": "wandb", "project": "math"}],
    }
    assert values(config, *expected) == expected


def test_verl_dapo() -> None:
    config = converted("verl_dapo.sh")
    assert left(config) == {
        "data.truncation",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.model.override_config.attention_dropout",
    }
    expected = {
        "name": "DAPO-32B",
        "steps": 200,
        "prompts_per_step": 256,
        "minibatch_size": 512,
        "token_budget": 12_288,
        "filter_groups": {"enable": True, "metric": "math", "max_num_gen_batches": 10, "at_limit": "error"},
        "loss.clip_high": 0.28,
        "loss.dual_clip": 10.0,
        "loss.kl": None,
        "reward.terms": [{"kind": "math"}, {"kind": "length", "soft": 3072, "hard": 4096, "weight": 1.0}],
    }
    assert values(config, *expected) == expected
    assert "reward.terms" in config.missing


def test_verl_yaml_and_other_estimators() -> None:
    config = converted("verl_rloo.yaml")
    expected = {
        "advantage.kind": "rloo",
        "loss.kl": {"coefficient": 0.01, "where": "reward", "estimator": "k1"},
        "trainer.replicas": 2,
        "trainer.schedule": {"kind": "cosine", "final": 0.1, "warmup_steps": 63},  # a tenth of 312 x 2, rounded up
        "rollout.engine.extra": {"disable_cascade_attn": True},
        "model.adapter": {"r": 32, "lora_alpha": 64.0},
    }
    assert values(config, *expected) == expected
    other = converted("verl_sglang.sh")
    assert left(other) == {"--config-path", "no_such.option"}
    assert values(other, "rollout.engine.kind") == {"rollout.engine.kind": "vllm"}
    importance = {"kind": "truncate", "level": "token", "cap": 3.0}
    expected = {"loss.kind": "gspo", "loss.importance": importance, "cluster.env": {"NCCL_DEBUG": "INFO"}}
    assert values(other, *expected) == expected


def test_trl_sft() -> None:
    config = converted("trl_sft.yaml", ConversionFacts(20_000, 8))
    assert left(config) == {"push_to_hub", "hub_token", "warmup_ratio"}
    assert set(config.missing) == {"batch_size", "steps"}  # it packs
    expected = {
        "name": "sft-lora",
        "folder": "runs/sft-lora",
        "batch_size": 128,  # 2 x 8 on 8 processes
        "steps": 157,  # the last one of an epoch may be smaller
        "trainer.schedule": {"kind": "cosine", "warmup_steps": 16},
        "train_on_prompt": False,
        "trainer.activation_checkpointing": True,
        "model.adapter.lora_dropout": 0.05,
        "model.adapter.lora_alpha": 16,
        "validation.every": 100,
        "validation.data.split": "test",
        "checkpoint.every": 500,
    }
    assert values(config, *expected) == expected


def test_trl_preferences_and_rewards() -> None:
    config = converted("trl_dpo.sh")
    assert config.complete
    expected = {
        "batch_size": 128,
        "steps": 157,
        "checkpoint.every": 157,
        "loss": {"type": ["sigmoid", "bco_pair", "sft"], "weights": [0.8, 0.2, 1.0], "beta": 0.05},
        "trainer.schedule": {"kind": "linear", "warmup_steps": 20},
        "model.dtype": "bfloat16",
    }
    assert values(config, *expected) == expected
    labelled = converted("trl_kto.sh", ConversionFacts(ranks=2))
    assert labelled.complete
    assert values(labelled, "loss", "batch_size") == {
        "loss": {"type": ["kto"], "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.3},
        "batch_size": 8,
    }  # fmt: skip
    scores = converted("trl_reward.yaml", ConversionFacts(20_000, 1))
    assert scores.complete
    assert values(scores, "loss.center_rewards_coefficient", "steps", "trainer.optimizer.lr") == {
        "loss.center_rewards_coefficient": 0.01, "steps": 5000, "trainer.optimizer.lr": 1e-5,
    }  # fmt: skip


def test_trl_grpo() -> None:
    config = converted("trl_grpo.sh")
    assert config.complete
    expected = {
        "prompts_per_step": 16,  # 8 x 4 on 4 processes: 128 completions in groups of 8
        "minibatch_size": 128,
        "epochs": 2,
        "steps": 400,  # 800 optimizer steps, 2 of each generation
        "checkpoint.every": 40,
        "advantage.kind": "dr_grpo",
        "loss.aggregation": "seq-mean-token-sum-norm",
        "loss.kl.coefficient": 0.04,
        "loss.clip_high": 0.28,
        "loss.mask_truncated": True,
        "loss.importance": {"kind": "mask", "level": "sequence", "cap": 3.0},
        "rollout.sampling": {"max_tokens": 1024, "temperature": 0.9},
        "rollout.engine": {"kind": "vllm", "count": 1},
        "placement": None,
    }
    assert values(config, *expected) == expected
    terms = values(config, "reward.terms")["reward.terms"]
    assert [(each["kind"], each["weight"]) for each in terms] == [("math", 1.0), ("regex", 0.5), ("function", 0.25)]
    assert terms[2]["path"] == "rewards:style"


PPO = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --remote_rm_url http://h/r"


@pytest.mark.parametrize(
    ("options", "path", "value"),
    [
        ("--advantage_estimator rloo", "advantage.kind", "rloo"),
        ("--advantage_estimator reinforce", "advantage.kind", "reinforce_plus_plus"),
        ("--advantage_estimator reinforce_baseline", "advantage.kind", "reinforce_plus_plus_baseline"),
        ("--advantage_estimator dr_grpo", "advantage.kind", "dr_grpo"),
        ("--advantage_estimator rloo --init_kl_coef 0.02", "loss.kl",
         {"coefficient": 0.02, "where": "reward", "estimator": "k1"}),
        ("--advantage_estimator rloo --async_train --async_queue_size 3", "rollout.max_staleness", 3),
        ("--advantage_estimator rloo --async_train", "loss.old_logprobs", "engine"),
        ("--advantage_estimator rloo --policy_loss_type gspo --eps_clip 3e-4", "loss.kind", "gspo"),
        ("--advantage_estimator rloo --enable_vllm_is_correction --vllm_is_correction_type icepop", "loss.importance",
         {"kind": "mask", "level": "token", "cap": 5.0, "floor": 0.5}),
        ("--advantage_estimator rloo --use_dynamic_batch --train_max_tokens_per_gpu 30000", "token_budget", 30000),
        ("--advantage_estimator rloo --ref_num_gpus_per_node 4", "reference", {"ranks": 4}),
        ("--advantage_estimator rloo --overlong_buffer_len 512 --prompt_max_len 8 --generate_max_len 2048",
         "reward.terms",
         [{"kind": "http", "url": "http://h/r", "signature": "openrlhf"},
          {"kind": "length", "soft": 1536, "hard": 2048, "weight": 1.0}]),
        ("--advantage_estimator rloo --lr_scheduler constant_with_warmup", "trainer.schedule.kind", "constant"),
    ],
)  # fmt: skip
def test_choices_of_openrlhf(options: str, path: str, value: Any) -> None:
    config = from_command("openrlhf", f"{PPO} --n_samples_per_prompt 8 {options}", rows=10_240)
    assert values(config, path)[path] == value
    assert left(config) == set()


def test_ppo_of_openrlhf() -> None:
    options = "--n_samples_per_prompt 4 --critic_learning_rate 8e-6 --value_clip 0.2 --freezing_actor_steps 5"
    options += " --lambd 0.95 --critic_num_gpus_per_node 4 --reward_clip_range -5 5"
    options += " --prompt_max_len 512 --generate_max_len 512"
    config = from_command(
        "openrlhf", f"{PPO} {options} --critic_num_gpus_per_node 4 --reward_clip_range -5 5", rows=10_240
    )
    assert config.complete and config.recipe == "ppo"
    expected = {
        "advantage": {"kind": "gae", "lam": 0.95},
        "critic.trainer.optimizer": {"lr": 8e-6, "betas": [0.9, 0.95]},
        "critic.trainer.ranks": 4,
        "critic.trainer.schedule.kind": "cosine",
        "critic.loss.clip": 0.2,
        "critic.warmup_steps": 5,
        "critic.warmup_lam": 0.95,
        "reward_clip": [-5.0, 5.0],
        "loss.kl": {"coefficient": 0.01, "where": "reward", "estimator": "k1"},
    }
    assert values(config, *expected) == expected


def test_critic_and_reward_model_of_openrlhf_share_devices() -> None:
    shared = f"{PPO} --colocate_critic_reward"
    own = shared.replace("--remote_rm_url http://h/r", "--reward_pretrain rm")
    assert values(from_command("openrlhf", own), "placement.colocate") == {"placement.colocate": "critic_reward"}
    assert values(from_command("openrlhf", shared), "placement.colocate") == {"placement.colocate": None}


def test_ppo_of_verl() -> None:
    command = (
        "python3 -m verl.trainer.main_ppo data.train_files=d custom_reward_function.path=r.py critic.optim.lr=2e-5"
    )
    config = from_command("verl", f"{command} critic.model.path=m actor_rollout_ref.model.path=m", rows=10_240)
    assert config.complete and config.recipe == "ppo"
    expected = {
        "critic.trainer.optimizer": {"lr": 2e-5, "weight_decay": 0.01},
        "critic.model.path": "m",
        "reward_clip": None,
        "loss.kl": {"coefficient": 0.0},
        "advantage.kind": "gae",
    }
    assert values(config, *expected) == expected


def test_reward_models() -> None:
    command = PPO.replace("--remote_rm_url http://h/r", "--reward_pretrain org/rm --reward_num_gpus_per_node 2")
    config = from_command(
        "openrlhf", f"{command} --advantage_estimator rloo --n_samples_per_prompt 4 --normalize_reward"
    )
    (term,) = values(config, "reward.terms")["reward.terms"]
    assert term == {"kind": "model", "path": "org/rm", "ranks": 2, "normalize": True}
    assert left(config) == {"--num_episodes"} & left(config)


@pytest.mark.parametrize(
    ("framework", "command"),
    [
        ("trl", "trl grpo --model_name_or_path m --dataset_name d --reward_model_name_or_path org/rm"),
        (
            "verl",
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d "
            "reward_model.enable=True reward_model.model.path=org/rm",
        ),
    ],
)
def test_reward_models_that_score_the_last_token_of_the_template(framework: SourceFramework, command: str) -> None:
    config = from_command(framework, command, rows=100, ranks=1)
    term = {"kind": "model", "path": "org/rm", "end": "template"} | ({"ranks": 8} if framework == "verl" else {})
    assert values(config, "reward.terms")["reward.terms"] == [term]  # verl's share the policy's GPUs


def test_a_share_of_steps_needs_the_number_of_rows() -> None:
    command = f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 8 --num_episodes 2 --lr_warmup_ratio 0.1"
    config = from_command("openrlhf", command)
    assert not config.complete and "steps" in config.missing and "--rows" in config.missing["steps"]
    assert left(config) == {"--num_episodes", "--lr_warmup_ratio"}


@pytest.mark.parametrize(
    ("framework", "command", "named"),
    [
        ("openrlhf", f"{PPO} --advantage_estimator flash_reinforce", "flash_reinforce"),
        ("openrlhf", "python -m openrlhf.cli.train_prm --pretrain m", "train_prm"),
        ("verl", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax", "remax"),
        ("trl", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo", "no training of TRL"),
        ("trl", "trl sft --model_name_or_path a\ntrl dpo --model_name_or_path a", "2 trainings (lines 1, 2)"),
        ("trl", "echo hello world", "no training of TRL"),
    ],
)
def test_what_cannot_be_converted_is_named(framework: SourceFramework, command: str, named: str) -> None:
    with pytest.raises(NotConvertible) as caught:
        from_command(framework, command)
    assert named in str(caught.value)


def test_unknown_options_and_values_are_listed() -> None:
    config = from_command("trl", "trl sft --model_name_or_path $MODEL --dataset_name d --zork 3 --fp16 junk9x", 100, 1)
    kinds = {each.name: each.kind for each in config.outcomes}
    assert kinds["--model_name_or_path"] == "unsupported" and kinds["--zork"] == "unknown"
    assert "model.path" in config.missing and values(config, "model.path") == {"model.path": "MODEL"}


def test_a_refused_value_is_left_out_and_its_option_listed() -> None:
    options = "--learning_rate -1 --adam_epsilon nonsense --max_grad_norm 0.5 --label_smoothing 0.7"
    config = from_command("trl", f"trl dpo --model_name_or_path m --dataset_name d {options}", 1000, 1)
    assert left(config) == {"--learning_rate", "--adam_epsilon", "--label_smoothing"}
    assert values(config, "trainer.max_grad_norm") == {"trainer.max_grad_norm": 0.5}


def test_batches_that_do_not_divide_a_step_are_listed() -> None:
    command = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d data.train_batch_size=100"
    )
    config = from_command(
        "verl", f"{command} actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=30"
    )
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in left(config)
    assert values(config, "minibatch_size") == {"minibatch_size": 100}


@pytest.mark.parametrize("value", ["1e400", "nan", "-1", "0", "100000000000", "x", "[1, 2]", "''"])
def test_absurd_sizes_neither_crash_nor_hang(value: str) -> None:
    openrlhf = f"--rollout_batch_size {value} --train_batch_size {value} --micro_train_batch_size {value}"
    facts = {"rows": 1000, "ranks": 2}
    from_command("openrlhf", f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 2 {openrlhf}", **facts)
    trl = f"--steps_per_generation {value} --num_generations {value} --max_completion_length {value}"
    from_command(
        "trl", f"trl grpo --model_name_or_path m --dataset_name d --per_device_train_batch_size {value} {trl}", **facts
    )
    verl = f"data.train_batch_size={value} data.max_response_length={value} trainer.total_training_steps={value}"
    from_command("verl", f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d {verl}")


def test_dropout_of_an_adapter_is_left_out_for_pairs() -> None:
    config = from_command(
        "trl", "trl dpo --model_name_or_path m --dataset_name d --use_peft --lora_dropout 0.1", 100, 1
    )
    assert (
        left(config) == {"--lora_dropout"}
        and values(config, "model.adapter.lora_dropout")["model.adapter.lora_dropout"] is None
    )
    quiet = from_command("trl", "trl dpo --model_name_or_path m --dataset_name d --use_peft", 100, 1)
    assert any("0.05" in each for each in quiet.notes)


def test_the_options_of_a_command_override_its_file(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("learning_rate: 1.0e-3\nmodel_name_or_path: m\ndataset_name: d\n")
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch train.py --config sft.yaml --learning_rate 2e-5\n")
    config = convert("trl", [str(script)], ConversionFacts(100, 1))
    assert values(config, "trainer.optimizer.lr") == {"trainer.optimizer.lr": 2e-5}
    assert any("the script itself is not read" in each for each in config.notes)


def test_nothing_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(
        f"touch {mark}\nX=$(touch {mark})\ntrl sft --model_name_or_path `touch {mark}` --dataset_name $(touch {mark}) "
        f"--seed $((1 + $(touch {mark}))) --chat_template_path <(touch {mark}) ; eval touch {mark}\n"
    )
    convert("trl", [str(script)], ConversionFacts(100, 1))
    document = tmp_path / "sft.yaml"
    document.write_text(f"model_name_or_path: !!python/object/apply:os.system ['touch {mark}']\ndataset_name: d\n")
    assert left(convert("trl", [str(document)], ConversionFacts(100, 1))) == {"model_name_or_path"}
    assert not mark.exists()


def test_text_of_a_source_stays_in_its_place(tmp_path: Path) -> None:
    """Names with line breaks neither end a comment nor add keys."""
    name = "out\nrecipe: sft\x1b[31m"
    words = [
        "trl",
        "sft",
        "--model_name_or_path",
        name,
        "--dataset_name",
        "d: [",
        f"--{name}",
        "x",
        "--output_dir",
        name,
    ]
    config = convert("trl", words, ConversionFacts(100, 1))
    loaded = yaml.safe_load(config.text)
    assert loaded["model"]["path"] == name and loaded["data"]["path"] == "d: [" and "\x1b" not in config.text


@pytest.mark.parametrize("text", ["a: " * 3, "{" * 5000, "x: &a [*a]", "\0", ""])
def test_files_that_are_no_configs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sft.yaml").write_text(text)
    with pytest.raises((NotConvertible, ConfigNotReadable)):
        convert("trl", [str(tmp_path / "sft.yaml")], ConversionFacts())


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("a: b\n" * 1_000_000)
    with pytest.raises(ConfigNotReadable, match="larger than"):
        convert("trl", [str(tmp_path / "sft.yaml")], ConversionFacts())
