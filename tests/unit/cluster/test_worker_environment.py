"""Environment variables of workers on other nodes: forwarding, precedence, differences."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.base.secrets import HIDDEN
from lockstep.cluster.cluster_node import RayNode, private_ray_environment
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.worker_environment import (
    NEVER_FORWARDED,
    ForwardedEnvironment,
    difference_messages,
    environment_differences,
    environment_report,
    forward_environment,
    without_secrets,
    worker_environment,
)
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.loader import check_config

PATTERNS = RayClusterConfig().forward_env
TOKEN = "hf_" + "a1B2c3D4" * 4


def test_matching_variables_are_forwarded_and_declared_ones_win() -> None:
    shell = {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "EDITOR": "vi", "VLLM_USE_V1": "1", "MY_FLAG": "3"}
    found = forward_environment(shell, [*PATTERNS, "MY_FLAG"], {"NCCL_DEBUG": "WARN", "OTHER": "x"})
    assert found.values == {
        "NCCL_DEBUG": "WARN", "HF_HOME": "/models", "VLLM_USE_V1": "1", "MY_FLAG": "3", "OTHER": "x",
    }  # fmt: skip
    assert found.kept_back == {}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        pytest.param("CUDA_VISIBLE_DEVICES", "0,1", "it numbers GPUs", id="gpus"),
        pytest.param("GLOO_SOCKET_IFNAME", "eth7", "cluster.interface", id="interface"),
        pytest.param("NCCL_SOCKET_IFNAME", "lo", "loopback", id="loopback"),
        pytest.param("VLLM_HOST_IP", "127.0.0.1", "address or port", id="address"),
        pytest.param("LOCKSTEP_TOKEN", "secret", "one process of one run", id="internal"),
        pytest.param("TORCHELASTIC_RUN_ID", "1", "its own", id="rank"),
    ],
)
def test_host_variables_are_not_forwarded(name: str, value: str, why: str) -> None:
    found = forward_environment({name: value}, [*PATTERNS, "TORCHELASTIC_*"], {})
    assert found.values == {} and why in found.kept_back[name]


def test_an_interface_for_all_nodes_is_forwarded() -> None:
    assert forward_environment({"NCCL_SOCKET_IFNAME": "eth"}, PATTERNS, {}).values == {"NCCL_SOCKET_IFNAME": "eth"}


def test_declared_variables_are_set() -> None:
    found = forward_environment({}, PATTERNS, {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.1.0.2"})
    assert found == ForwardedEnvironment({"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.1.0.2"}, {})


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "LOCKSTEP_BEACONS", "LOCKSTEP_TOKEN", "LOCKSTEP_WATCH_RANK"])
def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"cluster\.env: cannot set {name} for all workers: it "):
        check_config({"recipe": "sft", "cluster": {"kind": "ray", "env": {"HF_HOME": "/m", name: "1"}}}, "run.yaml")


def test_a_star_does_not_match_session_variables() -> None:
    shell = {"HOME": "/home/me", "SSH_CLIENT": "x", "RAY_ADDRESS": "127.0.0.1:1", "FOO": "1", "RANK": "0"}
    found = forward_environment(shell, ["*"], {})
    assert found.values == {"FOO": "1"} and list(found.kept_back) == ["RANK"]
    assert "HOME" in forward_environment(shell, ["HOME"], {}).kept_back


def test_precedence_of_variables() -> None:
    node = {"OMP_NUM_THREADS": "64", "PATH": "/node/bin", "LOCKSTEP_TOKEN": "another run's", "NCCL_DEBUG": "TRACE"}
    given = ForwardedEnvironment({"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "all"}, {})
    made = worker_environment(
        node, given, {"OMP_NUM_THREADS": "1"}, {"GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "0"}
    )
    assert made == {
        "OMP_NUM_THREADS": "1", "PATH": "/node/bin", "NCCL_DEBUG": "TRACE", "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip


def test_differences_are_reported_with_a_fix() -> None:
    shell = {
        "NCCL_IB_HCA": "mlx5",
        "HF_TOKEN": TOKEN,
        "EDITOR": "vi",
        "TRITON_CACHE_DIR": "/a",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    workers: Mapping[str, dict[str, str]] = {
        "b": {
            "HF_TOKEN": "another" + TOKEN,
            "TRITON_CACHE_DIR": "/b",
            "NCCL_DEBUG": "INFO",
            "CUDA_VISIBLE_DEVICES": "3",
        },
        "c": {"HF_TOKEN": TOKEN, "TRITON_CACHE_DIR": "/b", "NCCL_IB_HCA": "mlx5"},
    }
    found = {node: environment_differences(shell, worker) for node, worker in workers.items()}
    said = difference_messages(found)
    assert said == [
        "workers on b have HF_TOKEN=[hidden], and this shell has [hidden]: set cluster.env.HF_TOKEN to be sure",
        "workers on b have NCCL_DEBUG=INFO, which is not set in this shell",
        "NCCL_IB_HCA=mlx5 of this shell does not reach workers on b: name it in cluster.forward_env, or set "
        "cluster.env.NCCL_IB_HCA",
        "workers on b, c have TRITON_CACHE_DIR=/b, and this shell has /a: set cluster.env.TRITON_CACHE_DIR to be sure",
    ]
    assert difference_messages(found, declared=["NCCL_DEBUG", "HF_TOKEN", "NCCL_IB_HCA", "TRITON_CACHE_DIR"]) == []
    written = json.dumps(environment_report(forward_environment(shell, PATTERNS, {}), found))
    assert TOKEN not in written and HIDDEN in written and "CUDA_VISIBLE_DEVICES" in written


def test_secrets_are_removed_from_job_environments() -> None:
    given = forward_environment({"HF_TOKEN": TOKEN, "HF_HOME": "/m", "WANDB_MODE": TOKEN}, PATTERNS, {})
    shown = without_secrets(given)
    assert shown.values == {"HF_HOME": "/m"} and set(shown.kept_back) == {"HF_TOKEN", "WANDB_MODE"}
    assert "dashboard" in shown.kept_back["HF_TOKEN"]


names = st.one_of(
    st.sampled_from([name.rstrip("*") + "X" * name.endswith("*") for name in NEVER_FORWARDED]),
    st.from_regex(r"[A-Z_]{1,12}", fullmatch=True),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(names, st.sampled_from(["lo", "eth0", "1", TOKEN])))
def test_a_star_never_matches_host_variables(shell: dict[str, str]) -> None:
    found = forward_environment(shell, ["*"], {})
    assert set(found.values) <= set(shell) and not set(found.values) & set(found.kept_back)
    assert not {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCKSTEP_TOKEN", "HOME", "RANK"} & set(found.values)
    assert TOKEN not in json.dumps(
        environment_report(without_secrets(found), {"n": environment_differences(shell, {})})
    )


def test_interface_is_found_or_declared() -> None:
    declared = {"GLOO_SOCKET_IFNAME": "ib1", "VLLM_HOST_IP": "10.2.0.4"}
    given = forward_environment({"LOCKSTEP_BEACONS": "/mine"}, PATTERNS, declared, "ib")
    assert given == ForwardedEnvironment(declared | {"NCCL_SOCKET_IFNAME": "ib"}, {})
    of_node = {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.1.0.4", "CUDA_VISIBLE_DEVICES": "0,1"}
    own = {"GLOO_SOCKET_IFNAME": "old", "VLLM_HOST_IP": "old", "CUDA_VISIBLE_DEVICES": "7"}
    assert worker_environment(own, given, {}, of_node) == of_node | given.values
    assert worker_environment(own, forward_environment({}, (), {}), {}, of_node) == of_node


def test_nccl_interface_of_the_user_wins() -> None:
    given = forward_environment({"NCCL_SOCKET_IFNAME": "=eth1"}, ("NCCL_*",), {}, "ib")
    assert given.values["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_workers_of_a_ray_node_get_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "address": "10.1.0.4", "interface": "eth0", "shared": "/dev/shm/r", "cluster_dir": "/r/n", "logs": "/r/l",
        "place": "elsewhere", "beacons": "/dev/shm", "environment": {"VLLM_HOST_IP": "old", "PATH": "/bin"},
    }  # fmt: skip
    facts = NodeResources("id-1", "node-b", "10.1.0.4", 8, 2, 8, 2)
    node = RayNode(facts, None, found, forward_environment({}, (), {"OWN": "1"}), lambda spec: ("1",), False)
    assert node.environment_of(WorkerSpec("engine-0", "rollout", 0, "")) == {
        "VLLM_HOST_IP": "10.1.0.4", "GLOO_SOCKET_IFNAME": "eth0", "LOCKSTEP_BEACONS": "/dev/shm", "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1", "OWN": "1",
    }  # fmt: skip
    monkeypatch.setenv("SHELLS", "1")
    given = private_ray_environment({"OWN": "1"}).values
    assert (given["SHELLS"], given["OWN"]) == ("1", "1")
