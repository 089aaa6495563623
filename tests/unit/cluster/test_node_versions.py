"""Versions on the nodes of a run: read without imports, compared, and checked against the supported ones."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lockstep.cluster.node_versions import (
    SUPPORTED_VERSIONS,
    VersionError,
    check_node_versions,
    compare_versions,
    installed_versions,
    unsupported_packages,
    version_numbers,
)

ROOT = Path(__file__).parents[3]
NODE = {
    "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.3",
    "transformers": "5.19.0", "vllm": "0.32.0", "lockstep-rl": "0.1.0", "lockstep-rl source": "abc",
}  # fmt: skip


def test_versions_are_read_without_imports() -> None:
    code = "import sys, json; from lockstep.cluster.node_versions import installed_versions; f = installed_versions()"
    code += "; print(json.dumps([f, 'torch' in sys.modules, 'transformers' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    found, *imported = json.loads(done.stdout)
    assert found == installed_versions() and imported == [False, False]
    assert found["torch"] == metadata.version("torch") and found["python"] == sys.version.split()[0]
    import torch

    assert found["cuda"] == torch.version.cuda
    assert set(found) == set(NODE)


def test_equal_nodes_have_no_findings() -> None:
    assert compare_versions({"a": NODE, "b": NODE}, with_gpus=["a", "b"]) == []
    assert check_node_versions({"a": NODE}, {"a": ["ray", "vllm", "torch", "python"]}, []) == []


@pytest.mark.parametrize(
    ("changed", "level", "said"),
    [
        pytest.param({"python": "3.12.1"}, "refuse", "3.11.7 on a, c, 3.12.1 on b: install 3.11.7 on all", id="python"),
        pytest.param({"python": "3.11.9"}, "warn", "only the patch differs", id="python patch"),
        pytest.param({"ray": "2.59.0"}, "refuse", "ray differs between nodes", id="ray"),
        pytest.param({"torch": "2.12.0+cu130"}, "refuse", "torch differs", id="torch"),
        pytest.param({"torch": "2.13.1+cu130"}, "warn", "torch differs", id="torch patch"),
        pytest.param({"lockstep-rl source": "def"}, "refuse", "files differ although its version", id="source"),
        pytest.param({"nccl": "2.27.0"}, "refuse", "cannot form a communicator", id="nccl"),
        pytest.param({"cuda": "12.8"}, "refuse", "cuda differs", id="cuda"),
        pytest.param({"cuda": "13.1"}, "warn", "cuda differs", id="cuda minor"),
        pytest.param({"transformers": "5.18.0"}, "warn", "names of its weights", id="transformers"),
        pytest.param({"transformers": "5.19.3"}, None, "", id="transformers patch"),
        pytest.param({"vllm": "0.31.0"}, "refuse", "receive weights in the same way", id="vllm"),
        pytest.param({"vllm": None}, None, "", id="no vllm on a trainer's node"),
    ],
)  # fmt: skip
def test_differences_are_reported_with_nodes(changed: dict[str, str | None], level: str | None, said: str) -> None:
    found = compare_versions({"a": NODE, "b": NODE | changed, "c": NODE}, with_gpus=["a", "b", "c"])
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(said in finding.text for finding in found)


def test_a_head_without_gpus_may_have_another_build() -> None:
    head = NODE | {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}
    assert compare_versions({"head": head, "b": NODE, "c": NODE}, with_gpus=["b", "c"]) == []


@pytest.mark.parametrize(
    ("version", "said"),
    [
        pytest.param(None, r"vllm is not installed on b: pip install 'lockstep-rl\[vllm\]'", id="missing"),
        pytest.param("0.19.1", r"0\.19\.1 on b is too old \(.*\): 0\.20 or newer", id="old"),
    ],
)
def test_unsupported_versions_are_refused(version: str | None, said: str) -> None:
    with pytest.raises(VersionError, match=said) as caught:
        check_node_versions({"a": NODE, "b": NODE | {"vllm": version}}, {"a": ["vllm"], "b": ["vllm"]}, [])
    assert {finding.level for finding in caught.value.findings} == {"refuse"}


def test_newer_versions_cause_a_warning() -> None:
    newer = NODE | {"vllm": "0.33.0rc1"}
    assert check_node_versions({"b": newer}, {"b": ["vllm", "ray"]}, []) == [
        "vllm 0.33.0rc1 on b is newer than 0.32, with which Lockstep is tested"
    ]
    assert unsupported_packages("b", NODE | {"vllm": "0.32.9"}, ["vllm"]) == []
    assert version_numbers("2.13.0+cpu") == (2, 13, 0) and version_numbers("0.9.1rc2") == (0, 9, 1)


def test_pyproject_has_the_same_minimum_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *project["optional-dependencies"]["train"],
        *project["optional-dependencies"]["ray"],
        *project["optional-dependencies"]["vllm"],
    ]
    for name in ("ray", "vllm", "torch"):
        (line,) = (line for line in lines if line.split(">=")[0].partition("[")[0] == name)
        assert version_numbers(line.partition(">=")[2]) == version_numbers(SUPPORTED_VERSIONS[name].least), line
    assert project["requires-python"] == f">={SUPPORTED_VERSIONS['python'].least}"
