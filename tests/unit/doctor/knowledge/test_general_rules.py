"""Rules that hold for any program: addresses of both families, container networks, errors of the system, exit codes."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import raised, steps, write


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def names(verdict: Verdict) -> list[int | str]:
    return [each.rank if each.rank is not None else each.name for each in verdict.culprits]


@pytest.mark.parametrize(
    ("line", "cause", "address"),
    [
        (
            "misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to fd00:7::21<40> returned 113(No route to host)",
            "network_blocked",
            "fd00:7::21",
        ),
        (
            "RuntimeError: [/src/gloo/transport/tcp/pair.cc:534] Read error [fd00:7::21]:2154: Connection timed out",
            "network_blocked",
            "fd00:7::21",
        ),
        (
            "error timed out connecting, remote=[::ffff:10.7.0.21]:1234, error=SO_ERROR: Connection timed out, "
            "remote=[::ffff:10.7.0.21]:1234",
            "network_blocked",
            "10.7.0.21",
        ),
        (
            "[c10d] The client socket has timed out after 90000ms while trying to connect to (fd00:7::1, 29511).",
            "master_unreachable",
            "fd00:7::1",
        ),
        (
            "[W socket.cpp:7] [c10d] The client socket has failed to connect to [fd00:7::1]:29511 (errno: 110 - "
            "Connection timed out).",
            "master_unreachable",
            "fd00:7::1",
        ),
        (
            "[E socket.cpp:9] [c10d] The server socket has failed to bind to [fd00:7::1]:29511 (errno: 99 - Cannot "
            "assign requested address).",
            "master_unreachable",
            "fd00:7::1",
        ),
    ],
)
def test_a_peer_with_an_address_of_ipv6(tmp_path: Path, line: str, cause: str, address: str) -> None:
    verdict = judged(tmp_path, job=[f"[rank2]: {line}"])
    assert verdict.cause == cause and names(verdict) == [address]


def test_a_bridge_of_containers_between_hosts(tmp_path: Path) -> None:
    def host(name: str) -> list[str]:
        return [f"{name}:88:88 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", f"{name}: started"]

    refused = "n-1:88:99 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.19.0.1<4182> failed : {}"
    one = [*host("n-1"), refused.format("Connection refused")]
    assert judged(tmp_path / "two", a=one, b=host("n-2")).cause == "wrong_network_interface"
    assert judged(tmp_path / "one", a=one).cause != "wrong_network_interface"
    pool = "docker: could not find an available, non-overlapping IPv4 address pool among the defaults"
    assert judged(tmp_path / "pool", job=[pool]).cause == "wrong_network_interface"


def test_a_job_that_succeeds_has_no_wrong_interface(tmp_path: Path) -> None:
    lines = ["n-1:88:88 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", *steps(0, 20), "training finished"]
    assert judged(tmp_path, job=lines).cause == "benign"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["ImportError: /tmp/a.so: failed to map segment from shared object: Operation not permitted"], "os_limits"),
        (["OSError: /shared/env/lib/libtorch_cpu.so: file too short"], "storage_fault"),
        (
            [
                "Fatal Python error: Bus error",
                "",
                "Current thread 0x00007fa0 (most recent call first):",
                '  File "/usr/lib/python3.12/ctypes/__init__.py", line 379 in __init__',
                '  File "/env/lib/python3.12/site-packages/torch/__init__.py", line 300 in _load_global_deps',
            ],
            "storage_fault",
        ),
        (["Fatal Python error: Bus error", "", "Current thread 0x00007fa0:", '  File "/u/feed.py", line 3 in read'],
         "shm_too_small"),
        (["writer: cannot append to shard 4 (os error 122)"], "storage_fault"),
        (["OSError: [Errno 27] File too large"], "os_limits"),
        (["indexer stopped: accept() = EMFILE"], "os_limits"),
        (["sampler: memory allocation of 68719476736 bytes failed"], "host_oom"),
        (["metrics: cannot listen, errno=98"], "port_in_use"),
        (["peer 3: send failed with EHOSTUNREACH"], "network_blocked"),
        (["control: bind to 10.7.0.4 failed, EADDRNOTAVAIL"], "wrong_network_interface"),
        (["srun: error: n-4: task 0: Exited with exit code 127"], "config_error"),
        (["launch.sh: line 9: ./bin/serve: Permission denied"], "config_error"),
        (["srun: error: n-4: task 0: Exited with exit code 139"], "framework_bug"),
        (["usage: fit.py [-h] [--lr LR]", "fit.py: error: the lr must be positive"], "config_error"),
        (["ValueError: 'paged2' is not a valid CacheKind"], "config_error"),
    ],
)  # fmt: skip
def test_an_error_that_the_system_or_python_names(tmp_path: Path, lines: list[str], cause: str) -> None:
    assert judged(tmp_path, job=lines).cause == cause


def test_a_survived_error_number_is_no_failure(tmp_path: Path) -> None:
    lines = [
        *steps(0, 9),
        "[rank 0] shard cache: errno=28, reading from the store",
        *steps(0, 30, 9),
        "training finished",
    ]
    assert judged(tmp_path, job=lines).cause == "benign"


_FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 41.00 MiB is free. Process {} has 26.10 GiB memory in use. Process {} has 26.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 27.00 GiB memory in use."
)


def test_ranks_that_share_a_gpu_are_bound_wrongly(tmp_path: Path) -> None:
    one, other = raised(1, _FULL.format(811, 813)), raised(2, _FULL.format(811, 812))
    shared = judged(tmp_path / "shared", job=[*one, *other])
    assert shared.cause == "gpu_binding" and names(shared) == [1, 2]
    assert judged(tmp_path / "alone", job=one).cause == "rank_oom"


_HUGE = "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: {}"
_TRIED = "you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
_OBJECTS = (
    "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py",
    3100,
    "broadcast_object_list",
    "x",
)


def test_an_impossible_size_is_no_lack_of_memory(tmp_path: Path) -> None:
    huge, large = (_HUGE.format(_TRIED.format(size)) for size in (7310301889202515968, 343597383680))
    assert judged(tmp_path / "huge", job=raised(1, huge)).cause == "rank_exception_masked"
    assert judged(tmp_path / "large", job=raised(1, large)).cause == "host_oom"
    assert judged(tmp_path / "sent", job=raised(1, huge, _OBJECTS)).cause == "rank_divergent_branch"


def test_no_network_lies_between_a_host_and_itself(tmp_path: Path) -> None:
    def refused(by: str) -> str:
        ends = f"local=[10.7.0.4]:3312, remote=[{by}]:2154"
        return (
            f"[rank1]: failed to connect, willRetry=0, {ends}, error=SO_ERROR: Connection refused, remote=[{by}]:2154"
        )

    assert judged(tmp_path / "own", job=[refused("10.7.0.4")]).cause == "rank_exception_masked"
    assert judged(tmp_path / "other", job=[refused("10.7.0.5")]).cause != "rank_exception_masked"


_OWN = ("/home/u/train.py", 12, "main", "trainer.fit(model)")


def test_an_error_of_a_library_and_one_of_the_settings(tmp_path: Path) -> None:
    inside = ("/env/lib/python3.12/site-packages/fitter/loop.py", 88, "close", "self.bar.stop()")
    error = "AttributeError: 'NoneType' object has no attribute 'stop'"
    assert judged(tmp_path / "library", job=raised(0, error, _OWN, inside)).cause == "framework_bug"
    assert judged(tmp_path / "own", job=raised(0, error, _OWN)).cause == "rank_exception_masked"
    setting = ("/home/u/train.py", 30, "build", 'lr = cfg.optim["lr"]')
    assert judged(tmp_path / "setting", job=raised(0, "KeyError: 'lr'", setting)).cause == "config_error"
    assert judged(tmp_path / "late", job=[*steps(0, 9), *raised(0, "KeyError: 'lr'", setting)]).cause != "config_error"


UPDATES = {
    "SkyRL": [("/opt/skyrl/skyrl_train/weight_sync/broadcast_strategy.py", 251, "create_receiver",
               "model_update_group = init_custom_process_group(")],
    "OpenRLHF": [("/opt/openrlhf/trainer/ray/ppo_actor.py", 120, "__init__",
                  "self._model_update_group = init_process_group(")],
    "verl": [("/opt/verl/recipe/one_step_off_policy/fsdp_workers.py", 98, "create_weight_sync_group",
              "self._weight_sync_group = vllm_stateless_init_process_group(")],
    "TRL": [("/opt/trl/extras/vllm_client.py", 230, "init_communicator", "pg = StatelessProcessGroup.create(")],
    "slime": [("/opt/slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py", 160,
               "connect_rollout_engines_from_distributed", "model_update_groups = init_process_group(")],
}  # fmt: skip
"""The frame in which each framework forms the group of the weight update."""


@pytest.mark.parametrize("framework", UPDATES)
@pytest.mark.parametrize(
    "last",
    [
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/5 clients joined.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
        "(10.0.0.1, 41000).",
    ],
)
def test_a_rendezvous_belongs_to_the_operation_in_which_it_stands(tmp_path: Path, framework: str, last: str) -> None:
    above = ("/opt/train.py", 12, "main", "trainer.fit()")
    of_update = raised(0, last, above, *UPDATES[framework])
    assert judged(tmp_path / "update", job=[*steps(0, 3), *of_update]).cause == "vllm_weight_sync"
    of_start = raised(0, last, above, ("/opt/train.py", 5, "setup", "dist.init_process_group('nccl')"))
    assert judged(tmp_path / "start", job=of_start).cause in ("rendezvous_incomplete", "master_unreachable")
