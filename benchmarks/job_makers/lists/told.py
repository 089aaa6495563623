"""What needs GPUs or fabrics, told with the messages that the programs print (scripts/tell.py)."""

from benchmarks.job_makers.make_jobs import Job


def _told(name, framework, cls, how, culprit=None, **truth):
    return Job(name, framework, cls, f"python3 tell.py {how}", culprit, made="told", **truth)


TORCH, NCCL = "PyTorch", "PyTorch (NCCL)"
JOBS = (
    _told(
        "told-bus",
        NCCL,
        "gpu_hardware_fault",
        "bus",
        (5,),
        alt=(("n17",), ("0000:9b:00",)),
        fix="A GPU fell off the bus.",
    ),
    _told(
        "told-fabric",
        NCCL,
        "ib_rdma_fault",
        "fabric",
        None,
        also=("network_blocked",),
        fix="The two hosts do not reach each other over InfiniBand.",
    ),
    _told("told-duplicate", NCCL, "gpu_binding", "duplicate", (0, 1), fix="No set_device: both ranks use GPU 0."),
    _told("told-gpu-memory", TORCH, "rank_oom", "gpu_memory", (2,), fix="Rank 2 ran out of GPU memory."),
    _told("told-symbol", TORCH, "version_mismatch", "symbol", fix="torch needs a newer NCCL than is installed."),
    _told(
        "told-manager",
        TORCH,
        "gpu_hardware_fault",
        "manager",
        None,
        alt=(("dgx-4",),),
        also=("version_mismatch",),
        fix="The fabric manager does not run: its version is not the driver's.",
    ),
    _told(
        "told-peers",
        NCCL,
        "p2p_path_broken",
        "peers",
        None,
        sufficiency="hint",
        fix="ACS is on, peer transfers do not work; switch ACS off, NCCL_P2P_DISABLE=1 to probe.",
    ),
    _told(
        "told-assert",
        TORCH,
        "cuda_kernel_error",
        "kernel_assert",
        (3,),
        also=("rank_exception_masked",),
        fix="Rank 3 looks up an index outside the embedding.",
    ),
    _told(
        "told-heartbeat",
        NCCL,
        "watchdog_or_heartbeat",
        "heartbeat",
        (1,),
        also=("slow_rank_preprocess",),
        fix="The tokeniser holds the interpreter lock, so the watchdog cannot go on.",
    ),
    _told(
        "told-locked",
        NCCL,
        "os_limits",
        "locked",
        ("n22",),
        alt=((0, 1),),
        also=("ib_rdma_fault",),
        fix="memlock is 64 kB.",
    ),
    _told(
        "told-link",
        NCCL,
        "gpu_hardware_fault",
        "link",
        ("a31",),
        alt=((11,), ("0000:5d:00",)),
        fix="An NVLink of a31 failed.",
    ),
    _told("h-told-noisy", NCCL, "benign", "noisy"),
    _told("h-told-memory", TORCH, "benign", "survived_memory", fix="Nothing to fix: a smaller batch fitted."),
    _told(
        "told-tokenising",
        NCCL,
        "slow_rank_preprocess",
        "tokenising",
        (6,),
        fix="Rank 6 has no cache and tokenises for longer than the others wait.",
    ),
    _told(
        "told-bridge",
        NCCL,
        "wrong_network_interface",
        "bridge",
        (1,),
        alt=(("pod-1",), ("docker0",), ("172.17.0.2",)),
        also=("network_blocked",),
        fix="pod-1 uses docker0.",
    ),
    _told(
        "told-ordinal",
        TORCH,
        "gpu_binding",
        "ordinal",
        (3,),
        also=("config_error",),
        fix="Four ranks, but three GPUs are visible.",
    ),
)
