"""Findings about environments, among them settings that well-known posts recommend."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.environment.environment_lint import SHELL_ROLE, JobTraits, ProcessEnvironment, lint_environments
from lockstep.doctor.environment.environment_sources import gpu_names
from lockstep.doctor.environment.variable_table import load_variables
from lockstep.doctor.output.findings import Finding


def found(values: dict[str, str], **versions: str) -> list[Finding]:
    return lint_environments([ProcessEnvironment("", values)], versions)


def ids(findings: list[Finding], about: str) -> set[str]:
    return {each.id for each in findings if about in each.seen}


# (what is set, the variable in question, which findings it must give), one per line of the blocks that posts recommend
BLOCKS = [
    ({"NCCL_TIMEOUT": "3600"}, "NCCL_TIMEOUT", {"env-unread"}),
    ({"NCCL_BLOCKING_WAIT": "1"}, "NCCL_BLOCKING_WAIT", {"env-left-on"}),
    (
        {"NCCL_BLOCKING_WAIT": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"},
        "with NCCL_ASYNC_ERROR_HANDLING",
        {"env-conflict"},
    ),
    ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "NCCL_ASYNC_ERROR_HANDLING", {"env-left-on"}),
    ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, "NCCL_ASYNC_ERROR_HANDLING", {"env-renamed"}),
    ({"TORCH_NCCL_TIMEOUT": "1800"}, "TORCH_NCCL_TIMEOUT", {"env-unread"}),
    ({"TORCH_DISTRIBUTED_TIMEOUT": "1800"}, "TORCH_DISTRIBUTED_TIMEOUT", {"env-unread"}),
    ({"NCCL_DEBUG_LEVEL": "INFO"}, "NCCL_DEBUG_LEVEL", {"env-unread"}),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, "with NCCL_P2P_LEVEL", {"env-conflict"}),
    ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}, "with NCCL_IB_HCA", {"env-conflict"}),
    ({"NCCL_IBEXT_DISABLE": "1"}, "NCCL_IBEXT_DISABLE", {"env-left-on"}),
    ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE", set()),
    ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE", {"env-left-on"}),
    ({"NCCL_MAX_RINGS": "8"}, "NCCL_MAX_RINGS", {"env-unread"}),
    ({"NCCL_MIN_NRINGS": "8"}, "NCCL_MIN_NRINGS", {"env-renamed"}),
    ({"NCCL_BUFFSIZE": "4194304"}, "NCCL_BUFFSIZE", set()),
    ({"NCCL_BUFFSIZE": "67108864"}, "NCCL_BUFFSIZE", {"env-left-on"}),
    ({"NCCL_BUFFSIZE": "4M"}, "NCCL_BUFFSIZE", {"env-value"}),
    ({"NCCL_IB_TC": "106"}, "NCCL_IB_TC", set()),
    ({"NCCL_IB_TC": "300"}, "NCCL_IB_TC", {"env-value"}),
    ({"NCCL_IB_MTU": "4096"}, "NCCL_IB_MTU", {"env-unread"}),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, "TORCH_NCCL_TRACE_BUFFER_SIZE", {"env-renamed"}),
    ({"VLLM_USE_V1": "0"}, "VLLM_USE_V1", {"env-gone"}),
    ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "VLLM_ENABLE_V1_MULTIPROCESSING", set()),
]


@pytest.mark.parametrize(("values", "about", "expected"), BLOCKS, ids=lambda each: str(each)[:60])
def test_recommended_settings_are_checked(values: dict[str, str], about: str, expected: set[str]) -> None:
    assert ids(found(values), about) - {"env-fine"} == expected


def test_an_old_name_is_right_for_an_old_version() -> None:
    assert not ids(found({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, torch="2.5.1"), "TRACE_BUFFER")
    assert ids(found({"TORCH_FR_BUFFER_SIZE": "2000"}, torch="2.5.1"), "TORCH_FR") == {"env-unread"}
    assert not ids(found({"VLLM_USE_V1": "1"}, vllm="0.8.5"), "VLLM_USE_V1")
    assert ids(found({"VLLM_USE_V1": "1"}, vllm="0.32.0"), "VLLM_USE_V1") == {"env-gone"}
    assert not ids(found({"NCCL_CUMEM_ENABLE": "0"}, nccl="2.21.5"), "NCCL_CUMEM_ENABLE")
    assert ids(found({"NCCL_CUMEM_ENABLE": "0"}, nccl="2.27.3"), "NCCL_CUMEM_ENABLE") == {"env-left-on"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IFNMAE", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOCKET_IFACE_NAME", None),
        ("NCCL_DEBG", "NCCL_DEBUG"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("nccl_debug", "NCCL_DEBUG"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SECS", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("VLLM_WORKER_MULTIPROCESS_METHOD", "VLLM_WORKER_MULTIPROC_METHOD"),
        ("VLLM_WORKER_MULTIPROC_METHODS", "VLLM_WORKER_MULTIPROC_METHOD"),
    ],
)
def test_the_finding_about_a_misspelt_name_suggests_the_right_one(name: str, meant: str | None) -> None:
    findings = found({name: "x"})
    slips = [each for each in findings if each.id == "env-misspelt"]
    if meant is None:
        assert not slips
    else:
        assert len(slips) == 1 and slips[0].severity == "error" and meant in slips[0].seen


@pytest.mark.parametrize("value", ["=mlx5_1,mlx5_2", "^=mlx5_1", "mlx5", "mlx5_0", "mlx5_10,mlx5_11"])
def test_exact_names_of_cards_give_no_finding(value: str) -> None:
    assert not ids(found({"NCCL_IB_HCA": value}), "NCCL_IB_HCA")


@pytest.mark.parametrize("name", ["MY_NCCL_DEBUG", "NCC", "TIMEOUT", "PATH", "DEBUG", "VLLM_SERVICE_HOST", "_", "FOO"])
def test_variables_of_users_give_no_finding(name: str) -> None:
    assert [each.id for each in found({name: "x"})] == ["env-fine"]


CONTAINER = """
PATH HOME NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_REQUIRE_CUDA NVIDIA_PRODUCT_NAME CUDA_VERSION
CUDA_HOME CUDA_PATH NCCL_VERSION NV_LIBNCCL_PACKAGE NV_CUDA_LIB_VERSION CUDA_DRIVER_VERSION CUBLAS_VERSION
PYTORCH_VERSION PYTORCH_BUILD_VERSION TORCH_CUDA_ARCH_LIST TORCH_HOME UCX_HOME VLLM_USAGE_SOURCE VLLM_SERVICE_HOST
VLLM_SERVICE_PORT RAY_VERSION RAY_HEAD_IP HF_USER HF_MODEL HF_TOKEN2 MASTER_HOST MASTER_NODE TORCH_DEVICE CUDA_ARCH
CUDA_HOME2 TRANSFORMERS_VERSION OMP_PROC_BIND LD_LIBRARY_PATH PYTHONPATH SLURM_JOB_ID KUBERNETES_SERVICE_HOST
"""


def test_usual_variables_of_containers_and_jobs_give_no_finding() -> None:
    findings = found(dict.fromkeys(CONTAINER.split(), "1.2.3"))
    assert [each.id for each in findings] == ["env-fine"]


def test_a_word_instead_of_a_number_is_reported() -> None:
    assert ids(found({"NCCL_SHM_DISABLE": "true"}), "NCCL_SHM_DISABLE") >= {"env-value"}
    assert ids(found({"TORCH_NCCL_ENABLE_MONITORING": "true"}), "MONITORING") == set()
    assert ids(found({"TORCH_NCCL_ENABLE_MONITORING": "on"}), "MONITORING") == {"env-value"}
    assert ids(found({"NCCL_IB_TIMEOUT": "$TIMEOUT"}), "NCCL_IB_TIMEOUT") == set()


def test_hosts_are_compared_and_equal_findings_are_merged() -> None:
    hosts = [
        ProcessEnvironment(f"n{i}", {"NCCL_IB_DISABLE": "1" if i else "0", "NCCL_TIMEOUT": "1", "RANK": str(i)})
        for i in range(3)
    ]
    findings = lint_environments(hosts)
    differs = [each for each in findings if each.id == "env-differs"]
    assert [each.severity for each in differs] == ["error"]
    assert "NCCL_IB_DISABLE=0 on n0; NCCL_IB_DISABLE=1 on n1, n2" in differs[0].seen
    assert [each.host for each in findings if each.id == "env-unread"] == ["n0, n1, n2"]


def test_variables_that_do_not_reach_workers_are_reported() -> None:
    shell = ProcessEnvironment(
        "", {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0", "HOME": "/root", "RANK": "0"}, SHELL_ROLE
    )
    missing = [
        each
        for each in lint_environments([shell, ProcessEnvironment("n1", {"NCCL_DEBUG": "INFO"}, "policy")])
        if each.id == "env-not-seen"
    ]
    assert len(missing) == 1 and "NCCL_IB_HCA=mlx5_0" in missing[0].seen and missing[0].host == "n1 policy"
    by_ray = [each for each in lint_environments([shell], launcher="ray") if each.id == "env-not-seen"]
    assert len(by_ray) == 1 and "NCCL_DEBUG, NCCL_IB_HCA are set" in by_ray[0].seen and "ray start" in by_ray[0].fix
    assert (
        "NCCL_IB_HCA is set"
        in next(e for e in lint_environments([shell], launcher="openrlhf") if e.id == "env-not-seen").seen
    )
    assert not [each for each in lint_environments([shell], launcher="slurm") if each.id == "env-not-seen"]
    with pytest.raises(ValueError, match="unknown launcher 'x': expected one of accelerate"):
        lint_environments([shell], launcher="x")


def test_without_a_problem_there_is_one_finding_ok() -> None:
    findings = found({"NCCL_DEBUG": "WARN", "HOME": "/root"})
    assert [(each.id, each.severity) for each in findings] == [("env-fine", "ok")]
    assert findings[0].seen.startswith("1 variable")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "NCCL_ALGO",
            ["Ring", "^NVLS,NVLSTree", "ring,collnetdirect;allreduce:tree;broadcast:ring"],
            ["Rings", "auto"],
        ),
        ("NCCL_PROTO", ["Simple", "^LL128", "LL,LL128,Simple", "allreduce:^ll"], ["LL256", "simple-only"]),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            ["expandable_segments:True", "max_split_size_mb:128,x:[1:2]"],
            ["expandable_segments=True"],
        ),
        ("NCCL_DEBUG_SUBSYS", ["INIT,NET", "^COLL", "all"], ["INITS"]),
        ("HF_HUB_OFFLINE", ["1", "TRUE", "no"], ["y"]),
        ("UCX_IB_GID_INDEX", ["auto", "3"], ["-1"]),
        ("MASTER_PORT", ["29500"], ["0", "70000", "tcp://1"]),
        (
            "MASTER_ADDR",
            ["node-a", "10.0.0.1", "localhost", "fd00::5", "::1", "[fd00::5]", "node-a.example.org", "$HEAD"],
            ["http://u:p@head", "10.0.0.1:29500", "beef:29500", "a b", "head/x"],
        ),
        ("OMP_NUM_THREADS", ["8", "4,2"], ["auto", "0"]),
        ("RAY_memory_usage_threshold", ["0.9"], ["95"]),
    ],
)
def test_values(name: str, good: list[str], bad: list[str]) -> None:
    for value in good:
        assert "env-value" not in ids(found({name: value}), name), value
    for value in bad:
        assert "env-value" in ids(found({name: value}), name), value


def severities(values: dict[str, str], job: JobTraits) -> dict[str, str]:
    return {
        each.seen.split("=")[0]: each.severity
        for each in lint_environments([ProcessEnvironment("", values)], job=job)
        if each.id != "env-fine"
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "docker0"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("GLOO_SOCKET_IFNAME", "br-0a1b2c3d4e5f"),
    ],
)
def test_some_values_are_an_error_only_with_several_hosts(name: str, value: str) -> None:
    assert severities({name: value}, JobTraits(multi_host=False)) == {name: "note"}
    assert not any(
        each.fix for each in lint_environments([ProcessEnvironment("", {name: value})], job=JobTraits(multi_host=False))
    )
    assert severities({name: value}, JobTraits()) == {name: "warning"}
    assert severities({name: value}, JobTraits(multi_host=True)) == {name: "error"}
    assert [each.severity for each in lint_environments([ProcessEnvironment("", {name: value})], launcher="slurm")] == [
        "error"
    ]


@pytest.mark.parametrize("value", ["br-ex", "br0", "vmbr0", "=br-mgmt"])
def test_bridges_that_may_contain_the_network_card_give_no_finding(value: str) -> None:
    assert not severities(
        {"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value.lstrip("=")}, JobTraits(multi_host=True)
    )


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_an_error_only_if_the_job_uses_gpus(value: str) -> None:
    assert severities({"CUDA_VISIBLE_DEVICES": value}, JobTraits()) == {"CUDA_VISIBLE_DEVICES": "note"}
    assert severities({"CUDA_VISIBLE_DEVICES": value}, JobTraits(cuda=True)) == {"CUDA_VISIBLE_DEVICES": "error"}


@pytest.mark.parametrize(
    ("value", "wrong"), [("0,0", True), ("2, 0,1 ,0", True), ("0,10,1", False), ("GPU-a,GPU-b", False)]
)
def test_a_gpu_that_is_named_twice(value: str, wrong: bool) -> None:
    assert bool(severities({"CUDA_VISIBLE_DEVICES": value}, JobTraits())) is wrong


def test_patterns_of_the_shell_match_no_interface() -> None:
    assert set(severities({"GLOO_SOCKET_IFNAME": "eth*", "NCCL_SOCKET_IFNAME": "eth*"}, JobTraits()).values()) == {
        "error"
    }


def test_settings_that_accelerate_requires_on_rtx_40_are_kept() -> None:
    values = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    gaming = lint_environments(
        [ProcessEnvironment("", values)], job=JobTraits(multi_host=False, gpus=("NVIDIA GeForce RTX 4090",) * 2)
    )
    assert {(each.id, each.severity) for each in gaming if each.id != "env-fine"} == {("env-left-on", "note")}
    assert all("keep it" in each.fix for each in gaming if each.id != "env-fine")
    found = {
        each.seen: each
        for each in lint_environments(
            [ProcessEnvironment("", values)], job=JobTraits(multi_host=True, gpus=("NVIDIA H100",))
        )
    }
    assert {each.severity for each in found.values()} == {"warning"}
    assert all("except on GeForce RTX 40xx" in each.fix for each in found.values())


def test_a_variable_that_should_be_unset_gets_no_advice_to_rename_it() -> None:
    (found,) = lint_environments([ProcessEnvironment("", {"NCCL_BLOCKING_WAIT": "1"})])
    assert "TORCH_NCCL_BLOCKING_WAIT" in found.seen and "unset" in found.fix and found.severity == "warning"


def test_the_fix_for_the_old_engine_names_the_version_that_removed_it() -> None:
    (found,) = (
        each for each in lint_environments([ProcessEnvironment("", {"VLLM_USE_V1": "0"})]) if each.id == "env-gone"
    )
    assert "before 0.11" in found.fix


NAMES = st.one_of(
    st.sampled_from(sorted(load_variables().names)), st.text(max_size=20), st.just("NCCL_") | st.just("VLLM_X")
)


@given(
    st.dictionaries(NAMES, st.text(max_size=30)), st.dictionaries(st.sampled_from(["nccl", "torch", "vllm"]), st.text())
)
def test_any_environment_can_be_checked(values: dict[str, str], versions: dict[str, str]) -> None:
    lint_environments(
        [
            ProcessEnvironment("a", values),
            ProcessEnvironment("b", {}, "policy"),
            ProcessEnvironment("", values, SHELL_ROLE),
        ],
        versions,
        "verl",
    )


def test_a_thousand_hosts_are_judged_in_seconds() -> None:
    values = dict.fromkeys(sorted(load_variables().known)[:200], "1") | {
        f"NCCL_SOCKET_IFNAMES_{i}X": "1" for i in range(50)
    }
    began = time.process_time()
    findings = lint_environments(
        [ProcessEnvironment(f"n{i}", values | {"NCCL_DEBUG": "INFO" if i == 7 else "WARN"}) for i in range(1024)]
    )
    assert time.process_time() - began < 10
    assert any("NCCL_DEBUG=INFO on n7" in each.seen for each in findings if each.id == "env-differs")


def test_names_of_gpus_are_read_where_the_driver_writes_them(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == ()
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        folder = tmp_path / "driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 139\n")
    assert gpu_names(tmp_path) == ("NVIDIA GeForce RTX 4090",) * 2
