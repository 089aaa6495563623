"""The resources that a plan is computed from: sizes of the model, and the cluster."""

from pathlib import Path

import pytest

from lockstep.config.cluster import RayClusterConfig
from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.model_facts import model_facts
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning.resources import list_cluster_nodes, uses_existing_cluster


def test_the_smaller_of_two_lengths_counts_and_weights_must_fit(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=40)
    assert model_facts(ModelConfig(path=str(folder)), "cpu").context == 40
    assert model_facts(ModelConfig(path=str(folder), max_length=30), "cpu").context == 30
    assert model_facts(ModelConfig(path=str(folder), max_length=50), "cpu").context == 40
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read .*; download it again"):
        model_facts(ModelConfig(path=str(folder)), "cpu")


def test_an_address_means_an_existing_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert uses_existing_cluster(RayClusterConfig(address="auto")) and not uses_existing_cluster(RayClusterConfig())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert uses_existing_cluster(RayClusterConfig())


def test_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.run.planning.resources.find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match=r"pip install 'lockstep-rl\[ray\]'"):
        list_cluster_nodes(RayClusterConfig(address="auto"))
