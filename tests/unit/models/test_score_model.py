"""Score heads: where they are found, what is refused, and scores that are transformers' own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, CohereConfig, CohereForCausalLM

from lockstep.config.model import ModelConfig
from lockstep.data.row_layout import RowLayout
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import fill_policy
from lockstep.models.model_loader import load_policy
from lockstep.models.score_model import ScoreModel
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

TOKENS = torch.tensor([3, 5, 7, 9, 4])


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    """A reward model as transformers saves it."""
    make_tiny(tmp_path / "lm", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32)
    torch.manual_seed(1)
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1, dtype=torch.float32)
    lm.save_pretrained(tmp_path / "scorer")
    return tmp_path / "scorer"


def load(folder: Path, seed: int | None = None) -> ScoreModel:
    policy = load_policy(ModelConfig(path=str(folder), head="score"), "cpu", meta=True)
    fill_policy(policy, folder, "cpu", head_seed=seed)
    assert isinstance(policy, ScoreModel)
    return policy


def scores(policy: ScoreModel) -> torch.Tensor:
    every = torch.arange(len(TOKENS))
    with torch.no_grad():
        return policy(TOKENS, RowLayout([len(TOKENS)], [-1]), every, TOKENS)[0]


def change(folder: Path, to: Path, rename: dict[str, str], config: dict[str, object] | None = None) -> Path:
    """A copy of the folder with other names of weights, and other values in its config."""
    shutil.copytree(folder, to)
    weights = load_file(folder / "model.safetensors")
    renamed = {rename.get(name, name): tensor for name, tensor in weights.items() if rename.get(name) != ""}
    save_file(renamed, to / "model.safetensors", {"format": "pt"})
    stored = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(stored | (config or {})))
    return to


def test_scores_are_transformers(scorer: Path) -> None:
    lm = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [lm(TOKENS[None, : end + 1]).logits[0, 0] for end in range(len(TOKENS))]
    policy = load(scorer)
    assert not policy.has_new_head
    torch.testing.assert_close(scores(policy), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["value_head", "reward_head", "v_head", "rm_head", "v_head.summary"])
def test_heads_of_other_projects_are_read(scorer: Path, tmp_path: Path, name: str) -> None:
    """Also where the config does not say that there is one label."""
    other = {"architectures": ["RewardModel"], "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    renamed = change(scorer, tmp_path / "other", {"score.weight": f"{name}.weight"}, other)
    torch.testing.assert_close(scores(load(renamed)), scores(load(scorer)), rtol=0, atol=1e-6)


def test_a_head_with_several_labels_is_refused(scorer: Path, tmp_path: Path) -> None:
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    lm.save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"its head score\.weight has 3 labels, and a reward model has one"):
        load(tmp_path / "three", seed=0)


def test_a_bias_is_refused_unless_it_is_zero(scorer: Path) -> None:
    weights = load_file(scorer / "model.safetensors")
    save_file(weights | {"score.bias": torch.zeros(1)}, scorer / "model.safetensors", {"format": "pt"})
    load(scorer)
    save_file(weights | {"score.bias": torch.ones(1)}, scorer / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="its head has a bias"):
        load(scorer)


def test_a_missing_head_is_new_only_for_a_language_model_that_is_trained(scorer: Path, tmp_path: Path) -> None:
    first, again = load(tmp_path / "lm", seed=4), load(tmp_path / "lm", seed=4)
    assert first.has_new_head and torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, load(tmp_path / "lm", seed=5).head.weight)
    with pytest.raises(ModelError, match="it has no head that gives a score"):
        load(tmp_path / "lm")  # served, so that noise would be the reward
    beheaded = change(scorer, tmp_path / "beheaded", {"score.weight": ""})
    with pytest.raises(ModelError, match="it has no head that gives a score"):
        load(beheaded, seed=4)


def test_a_family_without_a_class_for_scores_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    CohereForCausalLM(CohereConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path / "cohere")
    with pytest.raises(ModelError, match="transformers has no cohere model with a head for scores"):
        load(tmp_path / "cohere", seed=0)


def test_a_vision_language_model_has_no_head_for_scores(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model", family="qwen3_vl")
    with pytest.raises(ModelError, match=r"vision-language model.*critics and reward models read no images"):
        load(folder, seed=0)
