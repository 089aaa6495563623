"""Secrets of a source are neither written into the config nor repeated in a message."""

from typing import Any

import pytest
import yaml

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.convert.source_command import SourceFramework

KEY = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --advantage_estimator rloo"
OPENRLHF += " --n_samples_per_prompt 4 --remote_rm_url http://h/r"
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d"
VERL += " actor_rollout_ref.model.path=m custom_reward_function.path=r.py"


def everything(config: ConvertedConfig) -> str:
    return f"{config.text} {config.outcomes} {config.missing} {config.notes} {config.values}"


def kinds(config: ConvertedConfig) -> dict[str, str]:
    return {each.name: each.kind for each in config.outcomes}


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("parent", ["", "dir/"])
def test_a_long_command_is_a_command(length: int, parent: str) -> None:
    command = f"{OPENRLHF} --use_wandb {KEY} --ckpt_path {parent}{'x' * length}"
    if not parent:
        command = command.replace("http://h/r", "r.py")
    config = convert("openrlhf", [command], ConversionFacts(1000))
    assert config.values["model"]["path"] == "m" and KEY not in everything(config)


@pytest.mark.parametrize("given", [["x" * 300 + KEY], [""], ["  "], ["", ""]])
def test_an_argument_that_is_neither_a_file_nor_a_command_is_not_repeated(given: list[str]) -> None:
    with pytest.raises(ValueError, match="argument is") as caught:
        convert("trl", given, ConversionFacts())
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("words", [TOKEN, f"--{TOKEN}", f"--{TOKEN} 3", f"--seed {TOKEN}"])
def test_stray_secrets_are_not_repeated(words: str) -> None:
    config = convert(
        "trl", [f"trl sft --model_name_or_path m --dataset_name d --seed 1 {words}"], ConversionFacts(9, 1)
    )
    assert TOKEN not in everything(config)


@pytest.mark.parametrize(
    ("framework", "command"),
    [
        ("verl", f"{VERL} custom_reward_function.reward_kwargs.api_key=plain-words"),
        ("verl", f"{VERL} custom_reward_function.reward_kwargs.judge={TOKEN}"),
        ("verl", f"{VERL} '+custom_reward_function.reward_kwargs.judges=[{{api_key: plain-words}}]'"),
        ("verl", f"{VERL} +actor_rollout_ref.rollout.engine_kwargs.vllm.hf_token=plain-words"),
    ],
)
def test_secrets_among_passed_on_options_are_refused(framework: SourceFramework, command: str) -> None:
    config = convert(framework, [command], ConversionFacts(1000))
    assert not config.complete and list(kinds(config).values()).count("unsupported") >= 1
    assert "plain-words" not in everything(config) and TOKEN not in everything(config)


@pytest.mark.parametrize("value", [KEY, TOKEN, "words"])
@pytest.mark.parametrize("name", ["MY_WANDB", "JUDGE_API_KEY"])
def test_secret_variables_are_forwarded_by_name(name: str, value: str) -> None:
    if (name, value) == ("MY_WANDB", "words"):
        return
    ray = f"""ray job submit --runtime-env-json '{{"env_vars": {{"{name}": "{value}", "NCCL_DEBUG": "INFO"}}}}' -- """
    for config in (
        convert("openrlhf", [ray + OPENRLHF], ConversionFacts(10_240)),
        convert("verl", [f"{VERL} +ray_kwargs.ray_init.runtime_env.env_vars.{name}={value}"], ConversionFacts(10_240)),
    ):
        cluster: dict[str, Any] = yaml.safe_load(config.text)["cluster"]
        assert cluster["forward_env"][-1] == name and name not in cluster.get("env", {})
        assert f'{value}"' not in everything(config) and f"={value}" not in everything(config)
