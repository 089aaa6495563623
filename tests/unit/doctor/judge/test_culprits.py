"""Culprits of failures."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import raised, steps, watchdog, write


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def names(verdict: Verdict) -> list[int | str]:
    return [each.rank if each.rank is not None else each.name for each in verdict.culprits]


def test_a_process_is_one_culprit_with_and_without_its_rank(tmp_path: Path) -> None:
    assertion = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: block: [8,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed."  # noqa: E501
    lines = [
        f"(Trainer pid=812, ip=10.0.0.8) {assertion}",
        "(Trainer pid=812, ip=10.0.0.8) [rank5]: RuntimeError: CUDA error: device-side assert triggered",
        "(Trainer pid=813, ip=10.0.0.9) [rank6]: RuntimeError: NCCL communicator was aborted on rank 6.",
    ]
    verdict = judged(tmp_path, job=lines)
    assert verdict.cause == "cuda_kernel_error" and names(verdict) == [5]


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("RuntimeError: CUDA error: invalid device ordinal", 1, "gpu_binding"),
        ("kernel: Out of memory: Killed process 771 (python) total-vm:9kB, anon-rss:5kB", -9, "host_oom"),
    ],
)
def test_the_local_rank_is_the_rank_if_a_job_has_one_host(tmp_path: Path, fault: str, code: int, cause: str) -> None:
    lines = [
        fault,
        f"E0301 11:00:00.000 1 api.py:874] failed (exitcode: {code}) local_rank: 4 (pid: 771) of binary: py",
    ]
    verdict = judged(tmp_path, job=[*steps(0, 3), *lines])
    assert verdict.cause == cause and names(verdict) == [4]
    several = [f"{rank}: {line}" for rank in range(0, 64, 8) for line in steps(rank, 3)] + steps(63, 3)
    assert names(judged(tmp_path / "many", job=[*several, *lines])) != [4]


def test_a_service_that_a_message_names(tmp_path: Path) -> None:
    message = "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='scorer-2', port=9000): Read timed out."
    verdict = judged(tmp_path, job=[*steps(0, 3), f"(Rewards pid=11) {message}"])
    assert verdict.cause == "remote_service_timeout" and names(verdict) == ["scorer-2"]
    hub = raised(3, message.replace("scorer-2", "huggingface.co"))
    assert names(judged(tmp_path / "hub", job=hub)) == [3]


def test_a_pod_that_ran_out_of_memory(tmp_path: Path) -> None:
    verdict = judged(tmp_path, pods=["NAME  READY  STATUS  RESTARTS", "llama-worker-3  0/1  OOMKilled  2  44m"])
    assert verdict.cause == "host_oom" and names(verdict) == ["llama-worker-3"]


def test_a_port_that_went_down_is_named_before_the_peer_that_does_not_answer(tmp_path: Path) -> None:
    lines = [
        "gn4:3301:3388 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.14.7<51220> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3",
    ]
    without_host_log = judged(tmp_path / "without_host_log", job=lines)
    assert without_host_log.cause == "ib_rdma_fault" and names(without_host_log) == ["10.0.14.7"]
    kernel = ["[60211.4] mlx5_core 0000:5e:00.0 mlx5_3: Port: 1 Link DOWN"]
    verdict = judged(tmp_path / "both", job=lines, **{"dmesg-gn4": kernel})
    assert verdict.cause == "ib_rdma_fault" and names(verdict) == ["mlx5_3"]
    assert verdict.culprits[0].host == "gn4"
    event = ["gn4:3301:3390 [2] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error"]
    verdict = judged(tmp_path / "event", job=[*event, *lines])
    assert verdict.cause == "ib_rdma_fault" and names(verdict) == ["mlx5_3"]


LINK = [
    "[Fri Mar 07 09:11:40 2025] ixgbe 0000:5e:00.0 ens2f0: NIC Link is Down",
    "[Fri Mar 07 09:11:42 2025] bond1: now running without any active interface!",
]
UNREACHED = (
    "gn4:71:99 [0] misc/socket.cc:58 NCCL WARN socketProgressOpt: Call to recv from 10.9.0.7<47037> failed : "
    "No route to host"
)


def test_a_host_without_link_is_named_before_the_peers_it_cannot_reach(tmp_path: Path) -> None:
    here = judged(tmp_path / "here", job=[UNREACHED], **{"dmesg-gn4": LINK})
    assert here.cause == "network_blocked" and names(here) == ["gn4"]
    elsewhere = judged(tmp_path / "elsewhere", job=[UNREACHED], **{"dmesg-gn5": LINK})
    assert names(elsewhere) == ["10.9.0.7"]
    up = ["[Fri Mar 07 09:11:50 2025] bond1: active interface up!"]
    again = judged(tmp_path / "again", job=[UNREACHED], **{"dmesg-gn4": [*LINK, *up]})
    assert names(again) == ["10.9.0.7"]


def test_the_head_that_does_not_answer_is_named_and_not_its_clients(tmp_path: Path) -> None:
    message = "[2025-01-14 10:00:31,551 E 90 90] (raylet) gcs_rpc_client.h:179: Failed to connect to GCS"
    lines = [f"{message} at address 10.1.0.3:6379 within 5 seconds.", f"{message} within 60 seconds. GCS may be dead."]
    verdict = judged(tmp_path, **{"node-a": lines, "node-b": lines})
    assert verdict.cause == "ray_node_or_gcs" and names(verdict) == ["10.1.0.3"]


def test_an_unresolvable_master_is_named_from_its_line(tmp_path: Path) -> None:
    lines = ["ValueError: host not found: Name or service not known"]
    with_name = ["2026-11-21 14:10:00,000 INFO main(batch_size=12, master=sft-master-0:23456)", *lines]
    verdict = judged(tmp_path / "with_name", **{"sft-worker-1": with_name})
    assert verdict.cause == "master_unreachable" and names(verdict) == ["sft-master-0"]
    without_host_log = judged(tmp_path / "without_host_log", job=raised(3, lines[0]))
    assert without_host_log.cause == "master_unreachable" and names(without_host_log) == [3]


def test_a_rank_that_lost_the_store_had_joined(tmp_path: Path) -> None:
    short = "[rank0]: DistStoreError: Timed out after 9 seconds waiting for clients. 4/6 clients joined."
    lost_store = [f"[rank{rank}]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes" for rank in (4, 5)]
    files = {"gn-1": [short], "gn-2": ["installing packages"], "gn-3": lost_store}
    verdict = judged(tmp_path, **files)
    assert verdict.cause == "rendezvous_incomplete" and names(verdict) == ["gn-2"]


def test_the_rank_that_wrote_nothing_did_not_join(tmp_path: Path) -> None:
    short = "[rank0]: DistStoreError: Timed out after 9 seconds waiting for clients. {}/{} clients joined."
    other = ["[rank1]: torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."]
    verdict = judged(tmp_path / "one", rank0=[short.format(2, 3)], rank1=other)
    assert verdict.cause == "rendezvous_incomplete" and names(verdict) == [2]
    # A number that no job has names nobody, and takes neither memory nor time.
    assert names(judged(tmp_path / "many", rank0=[short.format(2, 4 * 10**9)], rank1=other)) == []


def test_the_rank_that_builds_an_index_for_all(tmp_path: Path) -> None:
    message = [" > WARNING: could not find index map files, building the indices on rank 0 ..."]
    waiting = [line for rank in range(1, 4) for line in watchdog(rank, seq=3, numel=1)]
    verdict = judged(tmp_path, job=[*message, *waiting])
    assert verdict.cause == "slow_rank_preprocess" and names(verdict) == [0]


@pytest.mark.parametrize("where", [" on rank 0", ""])
def test_the_only_rank_that_saves_is_the_culprit(tmp_path: Path, where: str) -> None:
    message = [f"2026-11-21 14:20:00,000 trainer INFO saving checkpoint at step 440{where}"]
    own = watchdog(0, seq=60, operation="_ALLGATHER_BASE", numel=4096)
    waiting = [line for rank in range(1, 4) for line in watchdog(rank, seq=60, numel=1)]
    verdict = judged(tmp_path, job=[*message, *own, *waiting])
    assert verdict.cause in ("checkpoint_timeout", "rank_divergent_branch") and names(verdict) == [0]
    every = [f"2026-11-21 14:20:00,000 trainer INFO saving checkpoint at step 440 on rank {rank}" for rank in range(4)]
    together = judged(tmp_path / "all", job=[*every, *(line for rank in range(4) for line in watchdog(rank, seq=60))])
    assert names(together) == []


def _call(*frames: tuple[str, str]) -> tuple[tuple[str, int, str, str], ...]:
    return tuple((file, 10, "f", source) for file, source in frames)


_TRAINER = "/venv/lib/python3.11/site-packages/transformers/trainer.py"
_MODULE = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
_KIT = "/venv/lib/python3.11/site-packages/kit/make.py"


@pytest.mark.parametrize(
    ("last", "frames", "cause"),
    [
        (
            "TypeError: MyTrainer.compute_loss() got an unexpected keyword argument 'num_items'",
            _call(("train.py", "trainer.train()"), (_TRAINER, "loss = self.compute_loss(model, num_items=n)")),
            "version_mismatch",
        ),
        (
            "TypeError: Llama.forward() got an unexpected keyword argument 'num_items'",
            _call(("train.py", "trainer.train()"), (_TRAINER, "out = model(x, num_items=n)"),
                  (_MODULE, "return self._call_impl(*args, **kwargs)"),
                  (_MODULE, "return forward_call(*args, **kwargs)")),
            "version_mismatch",
        ),
        (
            "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompts'",
            _call(("train.py", "config = GRPOConfig(max_prompts=3)")),
            "config_error",
        ),
        (
            "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'tp_size'",
            _call(("train.py", "Engine(m, tp_size=2)"), (_KIT, "args = EngineArgs(")),
            "config_error",
        ),
        (
            "TypeError: build() got an unexpected keyword argument 'lrr'",
            _call(("train.py", "make(lrr=1)"), (_KIT, "return build(**kwargs)")),
            "rank_exception_masked",
        ),
    ],
)  # fmt: skip
def test_arguments_from_a_library_and_from_the_user(
    tmp_path: Path, last: str, frames: tuple[tuple[str, int, str, str], ...], cause: str
) -> None:
    assert judged(tmp_path, job=raised(0, last, *frames)).cause == cause


def test_an_exception_of_a_rank_is_found_without_its_frames(tmp_path: Path) -> None:
    """Loggers and excerpts omit the frames."""
    lines = ["[rank2]: FileNotFoundError: [Errno 2] No such file or directory: '/data/train.jsonl'"]
    verdict = judged(tmp_path / "file", job=[*steps(0, 5), *lines])
    assert verdict.cause == "storage_fault" and names(verdict) == [2]
    verdict = judged(tmp_path / "odd", job=[*steps(0, 5), "[rank3]: lib.shapes.OddError: these do not fit"])
    assert verdict.cause == "rank_exception_masked" and names(verdict) == [3]
    logged = "[2026-11-21 14:10:06] CRITICAL [lib.util:158, rank=6] Uncaught OddThing: these do not fit"
    verdict = judged(tmp_path / "logged", job=[*steps(0, 5), f"{logged}: Error: none"])
    assert names(verdict) == [6]


BARRIER = "RuntimeError: Rank 2 failed to pass monitoredBarrier in 600000 ms"
VERSIONS = (
    "gpu-a:10:21 [0] init.cc:811 NCCL WARN Mismatched NCCL version detected : rank 0 version 22703 rank 8 version 22602"
)
MISMATCH = (
    "error msg: Culprit rank 22; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce' does not "
    "match found collective type: 'all_gather', Culprit rank 110; Error type: COLLECTIVE_TYPE_MISMATCH, Expected"
)
NO_FAMILY = "[rank0]: ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"
EFA = (
    "libfabric:4517:17085::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address My EFA addr: "
    "fi_addr_efa://[fe80::13]:0:10 My host id: i-0d Peer EFA addr: fi_addr_efa://[fe80::b8]:0:9 Peer host id: i-0ce6d"
)
OFI = "ip-10-3-6-7:45:45 [4] NCCL WARN NET/OFI Request 0x7f1c completed with error. RC: 5. Error: Invalid address."
XIDS = [
    "[7.1] NVRM: Xid (PCI:0000:ed:00): 145, RLW_SRC_TRACK Nonfatal XC0 i0 Link -1 (0x00000004 0x80000000)",
    "[7.2] NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000)",
]


@pytest.mark.parametrize(
    ("lines", "origin"),
    [
        ([f"[rank0]: {BARRIER}"], [2]),
        ([VERSIONS], [0, 8]),
        ([MISMATCH], [22, 110]),
        (["gpu-a:10:10 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth2", NO_FAMILY], ["eth2"]),
        (["gpu-a:10:10 [0] NCCL INFO Bootstrap : Using [0]eth3:10.0.0.2<0>", NO_FAMILY], ["eth3"]),
        ([EFA, OFI], ["i-0ce6d"]),
        (XIDS, ["0000:dc:00"]),
        (["RuntimeError: Rank 4, node n7, device 0, iteration 31: Unexpected result nan (message='found NaN')"], [4]),
        (["node-2: Host key verification failed.",
          "node-1: [rank0]: torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 8/16 "
          "clients joined."], ["node-2"]),
    ],
)  # fmt: skip
def test_a_culprit_named_in_a_message(tmp_path: Path, lines: list[str], origin: list[int | str]) -> None:
    assert names(judged(tmp_path, job=[*steps(0, 5), *lines])) == origin


def test_listening_on_the_loopback_address_is_the_wrong_interface(tmp_path: Path) -> None:
    lines = [
        f"(Wrapper pid=4{rank}, ip=10.7.1.{rank}) [rank{rank}]: RuntimeError: Gloo connectFullMesh failed with "
        f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: refused, "
        f"remote=[127.0.0.1]:188{rank} (rank={rank}, size=16, local=[127.0.0.1])"
        for rank in (8, 9)
    ]
    verdict = judged(tmp_path, job=lines)
    assert verdict.cause == "wrong_network_interface" and names(verdict) == ["127.0.0.1"]


def test_a_traceback_in_the_summary_of_torchrun_belongs_to_its_rank(tmp_path: Path) -> None:
    lines = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_14:47:11",
        "  host      : n1",
        "  rank      : 11 (local_rank: 3)",
        "  exitcode  : 1 (pid: 343)",
        "  error_file: /tmp/e.json",
        "  traceback : Traceback (most recent call last):",
        '    File "/app/train.py", line 33, in step',
        '      loss = batch["labels"]',
        "  KeyError: 'labels'",
        "  ",
        "============================================================",
    ]
    for prefix in ("", "2025-06-11T10:00:00.123456789Z stderr F ", "2026-11-21 14:47:12,100 "):
        verdict = judged(tmp_path, n1=[f"{prefix}{line}" for line in lines])
        assert verdict.cause == "rank_exception_masked" and names(verdict) == [11], prefix


def test_the_culprit_of_a_task_without_a_rank_is_its_host(tmp_path: Path) -> None:
    lines = [
        "0: [rank3]: RuntimeError: NCCL communicator was aborted on rank 3.",
        "1: slurmstepd: error: execve(): /envs/rl/bin/torchrun: No such file or directory",
        "srun: error: gpu-b02: task 1: Exited with exit code 2",
    ]
    assert names(judged(tmp_path, job=lines)) == ["gpu-b02"]


def test_a_missing_rank_number_among_many_timeouts_is_silent(tmp_path: Path) -> None:
    message = [line for rank in range(16) if rank != 3 for line in watchdog(rank, seq=55)]
    assert names(judged(tmp_path / "one", job=message)) == [3]
    message = [line for rank in range(16) if rank % 2 for line in watchdog(rank, seq=55)]
    assert names(judged(tmp_path / "half", job=message)) == []


def test_the_awaited_rank_prepares_data(tmp_path: Path) -> None:
    last = (
        "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
        "store by key '0', but store->get('0') got error: Socket Timeout"
    )
    frames = (("/app/train.py", 9, "load", "with first():"), ("/lib/training_args.py", 9, "main_process_first", "x"))
    lines = raised(1, last, *frames)
    verdict = judged(tmp_path, job=[line.removeprefix("[rank1]: ") for line in lines])
    assert verdict.cause == "slow_rank_preprocess" and names(verdict) == [0]


def test_the_first_ended_rank_is_the_culprit_if_no_line_names_one(tmp_path: Path) -> None:
    lines = [
        "tracker: Network error (ConnectTimeout), entering retry loop.",
        "requests.exceptions.ReadTimeout: Read timed out.",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_14:47:11",
        "  host      : n1",
        "  rank      : 11 (local_rank: 3)",
        "  exitcode  : 1 (pid: 343)",
    ]
    verdict = judged(tmp_path, job=lines)
    assert verdict.cause == "remote_service_timeout" and names(verdict) == [11]


def test_a_container_common_to_all_lines_is_not_the_culprit(tmp_path: Path) -> None:
    lines = [
        "Fatal Python error: Segmentation fault",
        "E0611 10:45:14.690000 331 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) "
        "local_rank: 4 (pid: 344) of binary: /usr/bin/python3",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-21_14:47:11",
        "  host      : n1",
        "  rank      : 4 (local_rank: 4)",
        "  exitcode  : -11 (pid: 344)",
    ]
    for prefix in ("trainer-1  | ", "(Runner pid=7123, ip=10.0.0.77) ", "0: "):
        verdict = judged(tmp_path / prefix[0], job=[f"{prefix}{line}" for line in lines])
        assert names(verdict) == [4]


def test_the_default_number_of_torchrun_is_a_local_rank(tmp_path: Path) -> None:
    table = ["  host      : gpu-1", "  rank      : 5 (local_rank: 1)", "  exitcode  : 1 (pid: 905)"]
    failed = [each.replace("[rank1]: ", "[default1]:") for each in raised(1, "ValueError: rows differ in length")]
    verdict = judged(tmp_path, gpu_1=[*failed, "Root Cause (first observed failure):", "[0]:", *table])
    assert names(verdict) == [5]


def test_the_pid_of_a_remote_error_is_that_of_a_rank(tmp_path: Path) -> None:
    placed = [f"(Worker pid={700 + rank}, ip=10.2.0.1) initialized rank {rank} of 4" for rank in range(4)]
    error = [
        "Traceback (most recent call last):",
        '  File "/opt/rl/main.py", line 20, in <module>',
        "    ray.get(refs)",
        "ray.exceptions.RayTaskError(IndexError): ray::Worker.update() (pid=702, ip=10.2.0.1, actor_id=ab)",
        '  File "/opt/rl/worker.py", line 73, in update',
        "    ratio = new[mask] - old",
        "IndexError: list index out of range",
    ]
    assert names(judged(tmp_path, driver=[*placed, *error])) == [2]


def test_the_process_of_a_remote_error_is_named_if_its_rank_is_unknown(tmp_path: Path) -> None:
    error = [
        "Traceback (most recent call last):",
        '  File "/opt/rl/main.py", line 20, in <module>',
        "    ray.get(refs)",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Critic.update() (pid=702, ip=10.2.0.1, actor_id=ab)",
        '  File "/opt/rl/worker.py", line 73, in update',
        "    loss.backward()",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.25 GiB.",
    ]
    assert [(each.name, each.pid) for each in judged(tmp_path, driver=error).culprits] == [("10.2.0.1", 702)]


@pytest.mark.parametrize(
    ("line", "party"),
    [
        ("OSError: [Errno 28] No space left on device, on rank 3", 3),
        ("Rank 2 got OSError: [Errno 28] No space left on device", 2),
        ("No space left on device: process 1 failed to write", 1),
        ("raylet of node:10.7.0.9: No space left on device", "10.7.0.9"),
        ("writer: no answer, remote=[::ffff:10.7.0.9]:2154: Input/output error", "10.7.0.9"),
        ("store at [n-12]:8265: No space left on device", "n-12"),
        ("connection to [fd00:7::9]:2154: Input/output error", "fd00:7::9"),
    ],
)
def test_the_party_that_a_line_names(tmp_path: Path, line: str, party: int | str) -> None:
    others = [each for rank in range(4) for each in steps(rank, 3)]
    verdict = judged(tmp_path, job=[*others, line])
    assert verdict.cause == "storage_fault" and names(verdict) == [party]


def test_a_line_that_names_several_ranks_names_no_culprit(tmp_path: Path) -> None:
    line = "No space left on device: rank 1 failed, rank 2 failed"
    assert judged(tmp_path, job=[*steps(0, 3), line]).culprits == ()


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("sched.WorkerFailedError: Worker 'rollout/2' failed with exit code -9", "rollout/2"),
        ("[ERROR] pod grpo-worker-3 was OOMKilled", "grpo-worker-3"),
        ("Warning: replica actor-7 is unreachable; the job was killed by signal 9", "actor-7"),
    ],
)
def test_a_line_is_about_the_party_that_it_calls_failed(tmp_path: Path, line: str, culprit: str) -> None:
    assert names(judged(tmp_path, job=[*steps(0, 4), f"[rank0]: {line}"])) == [culprit]


def test_a_process_of_python_is_named_above_its_traceback(tmp_path: Path) -> None:
    crash = ["Traceback (most recent call last):", '  File "a.py", line 3, in step', "    grid[state]", "KeyError: 7"]
    assert names(judged(tmp_path / "named", job=["Process env-2:", *crash])) == ["env-2"]
    assert names(judged(tmp_path / "unnamed", job=["Process Process-2:", *crash])) == []


def test_the_table_of_hydra_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    table: list[str] = []
    for rank, signal in ((0, "15 (Terminated)"), (3, "9 (Killed)")):
        table += [f"=   RANK {rank} PID 122{rank} RUNNING AT cn12", f"=   KILLED BY SIGNAL: {signal}"]
    verdict = judged(tmp_path, job=[*steps(0, 4), *steps(3, 4), *table])
    assert verdict.cause == "external_kill" and names(verdict) == [3] and verdict.culprits[0].host == "cn12"


def test_an_evicted_pod_is_named_by_its_description(tmp_path: Path) -> None:
    full = "Pod ephemeral local storage usage exceeds the total limit of containers 40Gi."
    described = ["Name:       vit-worker-2", "Status:     Failed", "Reason:     Evicted", f"Message:    {full}"]
    verdict = judged(tmp_path, describe=described, job=steps(0, 4))
    assert verdict.cause == "storage_fault" and names(verdict) == ["vit-worker-2"]


def test_a_killed_pid_is_the_log_in_which_it_wrote(tmp_path: Path) -> None:
    agent = "W1128 09:39:47.293000 {} torch/distributed/run.py:865] node_rank is only used for static rdzv_backend."
    files = {"job": ["bash: line 1: 29519 Killed      torchrun --nnodes 2 train.py"],
             "node-a": [agent.format(29493)], "node-b": [agent.format(29519)]}  # fmt: skip
    verdict = judged(tmp_path, **files)
    assert verdict.cause == "external_kill" and names(verdict) == ["node-b"]


def test_an_error_of_all_ranks_tells_less_than_the_rank_in_a_message(tmp_path: Path) -> None:
    clipped = "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped."  # noqa: E501
    each = [line for rank in range(3) for line in raised(rank, clipped)]
    assert names(judged(tmp_path / "all", job=each)) == [0, 1, 2]
    lines = ["2026-11-28 09:37:46,990 - ERROR - step 9: local loss is nan on rank 1", *each]
    assert names(judged(tmp_path / "one", job=lines)) == [1]


def test_the_host_without_an_interface_is_named_if_others_have_it(tmp_path: Path) -> None:
    lines = ["n101:7110:7110 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ens5f0",
             "n107:6902:6902 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ens5f0",
             "n107:6902:6902 [0] misc/socket.cc:487 NCCL WARN Bootstrap : no socket interface found"]  # fmt: skip
    verdict = judged(tmp_path / "one", job=lines)
    assert verdict.cause == "wrong_network_interface" and names(verdict) == ["n107"]
    assert names(judged(tmp_path / "both", job=[*lines, lines[2].replace("n107", "n101")])) == ["ens5f0"]


def test_the_file_of_a_process_beside_the_training_names_it(tmp_path: Path) -> None:
    error = ["Traceback (most recent call last):", '  File "cache.py", line 8, in read', "    rows[key]"]
    files = {"cache": [*error, "KeyError: 'row-7'"], "train": ["step 1 loss 0.5", "step 2 loss 0.4"]}
    verdict = explain([write(tmp_path, **files)]).verdict
    assert verdict.cause == "rank_exception_masked" and [each.name for each in verdict.culprits] == ["cache"]


def test_a_process_that_the_end_of_the_job_terminated_is_not_named(tmp_path: Path) -> None:
    error = ["Traceback (most recent call last):", '  File "a.py", line 8, in read', "    rows[key]", "KeyError: 'a'"]
    lines = [*error, "sampler-1 killed by signal 15 (SIGTERM)", "sampler-2 killed by signal 15 (SIGTERM)"]
    named = [each.name for each in explain([write(tmp_path, job=lines[:5])]).verdict.culprits]
    assert "sampler-1" not in named


def test_supervisors_name_the_process_that_ended(tmp_path: Path) -> None:
    lines = [*steps(0, 5), "2026-11-21 14:20:01,014 WARN exited: learner_02 (terminated by SIGKILL; not expected)"]
    verdict = explain([write(tmp_path, job=lines)]).verdict
    assert verdict.cause == "external_kill" and [each.name for each in verdict.culprits] == ["learner_02"]
