"""Refusals of the plan that do not depend on the host's memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_run_plan import HOST, MODEL, config

from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning.resources import model_facts
from lockstep.run.planning.run_plan import InfeasibleError, make_plan


def test_a_prompt_needs_room_beside_its_completion() -> None:
    for field, changes in (
        ("rollout.sampling.max_tokens", {"rollout": {"sampling": {"max_tokens": 512}}}),
        (
            "evaluation.sampling.max_tokens",
            {"evaluation": {"data": {"path": "e.jsonl"}, "sampling": {"max_tokens": 512}}},
        ),
    ):
        with pytest.raises(InfeasibleError, match=f"{field} 512 leaves no room .* context of 512 .* 511 at most"):
            make_plan(config(**changes), MODEL, HOST)
    sft = {"recipe": "sft", "reward": None, "rollout": {"sampling": {"max_tokens": 512}}}
    make_plan(config(**sft), MODEL, HOST)  # generates nothing


def test_cuda_without_a_gpu_is_refused_for_any_number_of_ranks() -> None:
    with pytest.raises(InfeasibleError, match=r"finds no GPU .* cluster\.device=cpu"):
        make_plan(config(), MODEL, replace(HOST, device="cuda", gpus=0))


def test_the_smaller_of_two_lengths_counts_and_weights_must_fit(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=40)
    assert model_facts(ModelConfig(path=str(folder)), "cpu").context == 40
    assert model_facts(ModelConfig(path=str(folder), max_length=30), "cpu").context == 30
    assert model_facts(ModelConfig(path=str(folder), max_length=50), "cpu").context == 40
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model.safetensors is torn .*; fetch it again"):
        model_facts(ModelConfig(path=str(folder)), "cpu")
