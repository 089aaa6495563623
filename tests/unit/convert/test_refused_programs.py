"""Programs without a counterpart are refused by their names, with what there is instead."""

import pytest

from lockstep.config.algorithm import PreferenceLoss
from lockstep.config.recipes import RECIPES
from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import convert
from lockstep.convert.errors import NotConvertible
from lockstep.convert.source_command import SourceFramework


@pytest.mark.parametrize(
    ("framework", "command", "instead"),
    [
        ("openrlhf", "deepspeed --module openrlhf.cli.train_kd --pretrain m --teacher_model t", "recipe sft"),
        ("openrlhf", "torchrun -m openrlhf.cli.train_opd --model_name_or_path m", "recipe sft"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_prm --pretrain m", "recipe reward"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_kto --pretrain m", "loss.type kto"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_ppo --pretrain m", "train_ppo_ray"),
        ("openrlhf", "deepspeed openrlhf/cli/train_prm.py --pretrain m", "recipe reward"),
        ("trl", "python examples/scripts/xpo.py --model_name_or_path m", "recipe online_dpo"),
        ("trl", "accelerate launch trl/nash_md.py --model_name_or_path m", "recipe online_dpo"),
        ("trl", "accelerate launch examples/scripts/gkd.py --model_name_or_path m", "recipe sft"),
        ("trl", "python examples/scripts/prm.py --model_name_or_path m", "recipe reward"),
        ("trl", "python examples/scripts/orpo.py --model_name_or_path m", "loss.type orpo"),
        ("trl", "python examples/scripts/cpo.py --model_name_or_path m", "loss.type cpo"),
        ("trl", "python examples/scripts/ppo/ppo_tldr.py --output_dir m", "recipe ppo"),
        ("trl", "trl distillation --model_name_or_path m", "recipe sft"),
        ("trl", "trl vllm-serve --model m", "starts its engines itself"),
        ("verl", "python3 -m recipe.spin.main_spin data.train_files=d", "recipe online_dpo"),
        ("verl", "python3 -m recipe.sppo.main_sppo data.train_files=d", "loss.type sppo_hard"),
        ("verl", "python3 -m recipe.prime.main_prime data.train_files=d", "recipe grpo"),
        ("verl", "python3 -m verl.trainer.main_generation model.path=m", "lockstep generate"),
    ],
)
def test_a_program_without_counterpart_is_refused_by_name(
    framework: SourceFramework, command: str, instead: str
) -> None:
    with pytest.raises(NotConvertible) as caught:
        convert(framework, [command], ConversionFacts())
    text = str(caught.value)
    assert instead in text
    words = text.replace(",", " ").split()
    recipes = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "recipe"]
    assert set(recipes) - {"here:"} <= RECIPES.keys()
    for at, word in enumerate(words[:-1]):
        if word == "loss.type":
            assert PreferenceLoss(type=(words[at + 1],)).terms
