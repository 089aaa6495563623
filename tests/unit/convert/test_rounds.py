"""OpenRLHF's scripts that generate, score and train in rounds: iterative DPO and rejection sampling."""

import re
from pathlib import Path

import pytest
from converted_fields import left, values

from lockstep.config.loader import check_config
from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.convert.errors import NotConvertible

ITERATIVE = Path(__file__).parent / "sources" / "openrlhf_iterative_dpo.sh"
GENERATE = "python -m openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain m --dataset p --best_of_n 8"
GENERATE += " --max_new_tokens 512 --rollout_batch_size 256 --tp_size 1"
SCORE = "deepspeed --module openrlhf.cli.batch_inference --eval_task rm --pretrain rm --dataset g.jsonl"
TRAIN = "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain m --dataset r.jsonl --max_len 1024"
TRAIN += " --input_key input --output_key output --train_batch_size 64 --max_epochs 1 --lr_scheduler constant"


def converted(*commands: str) -> ConvertedConfig:
    return convert("openrlhf", ["\n".join(commands)], ConversionFacts())


def test_iterative_dpo() -> None:
    config = convert("openrlhf", [str(ITERATIVE)], ConversionFacts())
    assert config.recipe == "online_dpo" and left(config) == set() and set(config.missing) == {"steps"}
    expected = {
        "model.path": "org/sft-8b",  # of the first round
        "reference": None,  # the same
        "prompts_per_step": 4096,
        "group_size": 4,
        "minibatch_size": 512,  # 128 pairs, each from 4 completions
        "loss": {"beta": 0.2},
        "data": {"path": "org/prompts", "prompt_column": "messages", "chat": True, "overlong": "drop"},
        "reward.terms": [{"kind": "model", "path": "org/rm-8b", "ranks": 8}],
        "rollout.sampling": {"max_tokens": 1024, "temperature": 0.8},
        "rollout.engine.count": 4,
        "rollout.engine.tensor_parallel_size": 2,
        "placement.colocate": "all",
        "token_budget": 2 * 2 * 2048,
        "trainer.ranks": 8,
        "trainer.optimizer.lr": 4e-7,
    }
    assert values(config, *expected) == expected


def test_rejection_sampling() -> None:
    config = converted(GENERATE, f"{SCORE} --post_processor rs", TRAIN)
    assert config.recipe == "rejection_sampling" and left(config) == set()
    expected = {
        "best_k": 1,
        "group_size": 8,
        "prompts_per_step": 256,
        "minibatch_size": 512,  # 64 learned completions, each the best of 8
        "data.prompt_column": "input",
        "model.max_length": 1024,
        "rollout.engine.count": 4,
        "epochs": 1,
    }
    assert values(config, *expected) == expected
    made = check_config(dict(config.values), "test")
    assert made.recipe == "rejection_sampling" and made.trainer.schedule.kind == "constant"


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        ((GENERATE, f"{SCORE} --post_processor iter_dpo", TRAIN), "for train_dpo, not for train_sft"),
        ((GENERATE, f"{SCORE} --post_processor csft", TRAIN), "recipe rejection_sampling"),
        ((GENERATE, GENERATE, f"{SCORE} --post_processor rs", TRAIN), r"generates twice \(lines 1 and 2\)"),
        ((f"{SCORE} --post_processor rs", TRAIN), "generates completions"),
        ((GENERATE,), "lockstep generate"),
    ],
)
def test_what_is_no_round_is_refused(commands: tuple[str, ...], message: str) -> None:
    with pytest.raises(NotConvertible, match=message):
        converted(*commands)


def test_an_inference_that_chooses_nothing_leaves_the_training_as_it_is() -> None:
    config = converted(TRAIN, GENERATE)
    assert config.recipe == "sft" and values(config, "data.path") == {"data.path": "r.jsonl"}


@pytest.mark.parametrize(
    ("generate", "listed"),
    [
        (" --greedy_sampling", {"generate --greedy_sampling"}),
        (" --repetition_penalty 1.1", {"generate --repetition_penalty"}),
        (" --no_such 1", {"generate --no_such"}),
        (" --best_of_n 1", {"generate --best_of_n"}),
        (" --input_template Q:{}", set()),
        (" --top_p 0.9 --seed 3", set()),
    ],
)
def test_options_of_a_stage_are_listed_with_it(generate: str, listed: set[str]) -> None:
    assert left(converted(f"{GENERATE}{generate}", f"{SCORE} --post_processor rs", TRAIN)) == listed


def test_scripts_of_old_versions_are_known_by_their_files() -> None:
    commands = (GENERATE, f"{SCORE} --post_processor rs", TRAIN)
    old = [re.sub(r"(?:-m|--module) openrlhf\.cli\.(\w+)", r"../\1.py", each) for each in commands]
    assert all("../" in each for each in old) and converted(*old).recipe == "rejection_sampling"
