"""The environment and the version of DeepSpeed."""

import os
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lockstep.train.deepspeed import deepspeed_library
from lockstep.train.deepspeed.deepspeed_library import SUPPORTED, require_deepspeed, set_environment
from lockstep.train.errors import TrainerUnsupported

ROOT = Path(__file__).parents[4]


def test_the_supported_versions_are_those_that_the_extra_installs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [each for each in map(Requirement, extras["deepspeed"]) if each.name == "deepspeed"]
    assert [each.specifier for each in wanted] == [SUPPORTED]
    locked = (ROOT / "requirements-deepspeed.lock").read_text().split("deepspeed==")[1].split()[0]
    assert locked in SUPPORTED


@pytest.mark.parametrize(
    ("found", "supported"),
    [("0.18.2", False), ("0.19.8", True), ("0.19.9+a", True), ("0.20.0", False)],
)
def test_other_versions_are_refused(found: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_library, "version", lambda _: found)
    if supported:
        require_deepspeed("trainer.kind")
        return
    with pytest.raises(TrainerUnsupported) as caught:
        require_deepspeed("trainer.kind")
    assert f"deepspeed {found}" in str(caught.value) and "0.19.8" in str(caught.value)


def test_what_a_launcher_left_in_the_environment_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "3", "DS_ACCELERATOR": "xpu", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    set_environment(torch.device("cuda", 1))

    assert (os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]) == ("1", "cuda")
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
