"""Tiny models, created once per session."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lockstep.config.model import ModelConfig
from lockstep.models.model_loader import load_policy
from lockstep.models.policy_model import PolicyModel
from lockstep.models.tiny_model import make_tiny

KINDS = [(family, tied) for family in ("qwen2", "llama") for tied in (True, False)]


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    base = tmp_path_factory.mktemp("tiny")
    return {
        (family, tied): make_tiny(
            base / f"{family}-{tied}", family=family, tie_embeddings=tied, hidden=32, ffn=48, seed=3, max_length=128
        )
        for family, tied in KINDS
    }


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def folder(request: pytest.FixtureRequest, tiny_folders: dict[tuple[str, bool], Path]) -> Path:
    return tiny_folders[request.param]


@pytest.fixture
def policy(folder: Path) -> PolicyModel:
    """A policy with weights so large that attention and head matter; random initialisation is nearly uniform."""
    loaded = load_policy(ModelConfig(path=str(folder)), "cpu")
    sharpen(loaded)
    return loaded


@pytest.fixture
def hf(policy: PolicyModel, folder: Path):
    """transformers' own model with the same weights and its own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.load_state_dict(policy.lm.state_dict())
    return model


def sharpen(module, factor: float = 6.0) -> None:
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
