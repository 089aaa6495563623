"""TRL's online DPO becomes `recipe: online_dpo`. The numbers are worked out from what TRL documents."""

from typing import Any

import pytest
from converted_fields import left, value

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert

TRL = "accelerate launch --num_processes 4 dpo_online.py --model_name_or_path m --dataset_name d"


def converted(options: str, program: str = TRL) -> ConvertedConfig:
    return convert("trl", [f"{program} {options}"], ConversionFacts(rows=1000))


@pytest.mark.parametrize(
    ("options", "path", "expected"),
    [
        ("--reward_model_path rm", "reward.terms", [{"kind": "model", "path": "rm", "end": "template"}]),
        ("--reward_model_path rm --use_vllm", "reward.terms",
         [{"kind": "model", "path": "rm", "end": "template", "ranks": 4}]),  # its copies share the GPUs
        ("--reward_model_path rm --missing_eos_penalty 2", "reward.terms",
         [{"kind": "model", "path": "rm", "end": "template"},
          {"kind": "length", "soft": 63, "hard": 64, "weight": 2.0}]),
        ("--reward_model_path rm --per_device_train_batch_size 2", "prompts_per_step", 8),
        ("--reward_model_path rm --per_device_train_batch_size 2 --num_train_epochs 1", "steps", 125),
        ("--reward_model_path rm --per_device_train_batch_size 3 --num_train_epochs 2", "steps", 168),  # 2 x 84
        ("--reward_model_path rm", "rollout.sampling", {"max_tokens": 64, "temperature": 0.9}),
        ("--reward_model_path rm", "model.max_length", 512),
        ("--reward_model_path rm --per_device_train_batch_size 2", "token_budget", 2 * 2 * 512),
        ("--reward_model_path rm --beta 0.3", "loss", {"beta": 0.3}),
        ("--reward_model_path rm --top_k 20 --top_p 0.9 --min_p 0.1", "rollout.sampling",
         {"max_tokens": 64, "temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.1}),
        ("--reward_model_path rm --use_vllm --gpu_memory_utilization 0.4", "rollout.engine.gpu_memory_utilization",
         0.4),
        ("--reward_model_path rm --use_vllm --vllm_mode server", "placement", None),
        ("--reward_model_path rm", "group_size", 2),
    ],
)  # fmt: skip
def test_options_of_online_dpo(options: str, path: str, expected: Any) -> None:
    config = converted(options)
    assert config.recipe == "online_dpo" and value(config, path) == expected
    assert left(config) <= {"--num_train_epochs"}


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ("--judge pair_rm", {"--judge"}),
        ("--reward_model_path rm --beta 0.1 0.2", {"--beta"}),
        ("--reward_model_path rm --loss_type ipo", {"--loss_type"}),
        ("--reward_model_path rm --max_new_tokens 600", set()),
        ("--reward_model_path rm --max_new_tokens 600 --max_length 512", {"--max_length"}),
        ("--reward_model_path rm --use_peft", set()),
    ],
)
def test_what_online_dpo_of_trl_has_alone_is_listed(options: str, listed: set[str]) -> None:
    assert left(converted(f"{options} --max_steps 10")) == listed


def test_the_program_is_known_by_the_name_of_its_script() -> None:
    for name in ("dpo_online.py", "online_dpo.py", "examples/scripts/dpo_online_vlm.py"):
        config = converted("--reward_model_path rm --max_steps 3", f"python {name} --model_name_or_path m")
        assert config.recipe == "online_dpo"
    assert converted("--max_steps 3", "python dpo.py --model_name_or_path m").recipe == "preference"
