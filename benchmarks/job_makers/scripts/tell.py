"""Writes a log that needs GPUs or fabrics, with the messages that PyTorch, NCCL and the driver print: `tell.py NAME`."""

import random
import sys
from pathlib import Path

OUT = Path("out")
draw = random.Random(sys.argv[1])
HINT = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data."
)


def write(name, lines):
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text("\n".join(lines) + "\n")


def clock(second, micro=None):
    text = f"{9 + second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
    return text if micro is None else f"{text}.{micro:09d}"


def steps(first, last, every=1, rank=None):
    said = "" if rank is None else f"[rank{rank}] "
    for step in range(first, last, every):
        yield f"2026-11-26 {clock(3 * step)} {said}step {step} | loss {3 / (1 + step / 40):.4f} | tok/s {draw.randint(9100, 9800)}"


def timed_out(rank, second, sequence, op, numel, limit_s, done=None, enqueued=None):
    done = sequence - 1 if done is None else done
    enqueued = sequence if enqueued is None else enqueued
    at, limit = clock(second, draw.randint(10**8, 9 * 10**8)), limit_s * 1000
    work = f"WorkNCCL(SeqNum={sequence}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)={limit})"
    head = f"[rank{rank}]:[E1126 {at} ProcessGroupNCCL.cpp"
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    yield f"{head}:683] [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for {limit + draw.randint(2, 90)} milliseconds before timing out."
    yield (
        f"{head}:2241] {group}  failure detected by watchdog at work sequence id: {sequence} PG status: last enqueued "
        f"work: {enqueued}, last completed work: {done}"
    )
    yield f"{head}:730] [Rank {rank}] {HINT}"
    yield f"{head}:744] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down."


def trace(rank, *frames, error):
    head = f"[rank{rank}]: "
    yield head + "Traceback (most recent call last):"
    for file, line, function, code in frames:
        yield f'{head}  File "{file}", line {line}, in {function}'
        yield f"{head}    {code}"
    yield head + error


MAIN = ("/workspace/train/pretrain.py", 214, "main", "loss = step(model, batch)")
FORWARD = ("/workspace/train/pretrain.py", 88, "step", "out = model(batch['input_ids'])")


def bus():
    log = list(steps(0, 120))
    log += [
        *trace(
            5,
            MAIN,
            ("/workspace/train/pretrain.py", 93, "step", "torch.cuda.synchronize()"),
            error="torch.AcceleratorError: CUDA error: unspecified launch failure",
        ),
        "[rank5]: CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    ]
    for rank in (0, 1, 2, 3, 4, 6, 7):
        log += timed_out(rank, 961, 1893, "ALLREDUCE", 134217728, 600)
    write("train-n17.log", log)
    write(
        "dmesg-n17.txt",
        [
            "[318220.114502] pcieport 0000:97:01.0: AER: Uncorrected (Fatal) error message received from 0000:97:01.0",
            "[318220.911874] NVRM: GPU at PCI:0000:9b:00: GPU-2f7ac1d0-6a0d-98b7-11f4-6f1f3f1f5b1e",
            "[318220.911880] NVRM: Xid (PCI:0000:9b:00): 79, pid=41877, name=python, GPU has fallen off the bus.",
            "[318220.911885] NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.",
        ],
    )


def fabric():
    for host, rank, peer in (("n03", 0, "10.24.8.14"), ("n04", 8, "10.24.8.13")):
        log = list(steps(0, 60)) if rank == 0 else []
        for local in (1, 4):
            pid = 52100 + rank + local
            log.append(
                f"{host}:{pid}:{pid + 611} [{local}] transport/net_ib/p2p.cc:1322 NCCL WARN NET/IB: Got completion from peer "
                f"{peer}<{draw.randint(30000, 60000)}> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 "
                f"vendor_err=129 req_type=Send localGid fe80::a288:c203:{local}1:7f{rank}0 remoteGid fe80::a288:c203:{local}1:7f9c hca mlx5_{local}"
            )
            log.append(f"{host}:{pid}:{pid + 611} [{local}] NCCL INFO transport/net.cc:1393 -> 6")
            log.append(f"{host}:{pid}:{pid + 611} [{local}] NCCL INFO proxy.cc:743 -> 6 [Progress Thread]")
            log += trace(
                rank + local,
                MAIN,
                error="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
                "remote process exited or there was a network error, NCCL version 2.27.5",
            )
            log.append(
                f"[rank{rank + local}]: ncclRemoteError: A call failed possibly due to a network error or a remote process "
                "exiting prematurely."
            )
        write(f"{host}.log", log)


def duplicate():
    log = ["WARNING: LOCAL_RANK is not set, using cuda:0"] * 2
    for rank, other in ((0, 1), (1, 0)):
        pid = 7701 + rank
        log.append(
            f"box:{pid}:{pid + 20} [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device 1a000"
        )
        log += trace(
            rank,
            ("/home/user/project/run_sft.py", 61, "<module>", "dist.barrier()"),
            error="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, "
            "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5",
        )
        log += [
            f"[rank{rank}]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            f"[rank{rank}]: Last error:",
            f"[rank{rank}]: Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device 1a000",
        ]
    write("sft.log", log)


def gpu_memory():
    for rank in range(4):
        log = list(steps(0, 45, rank=rank))
        if rank == 2:
            log += trace(
                2,
                MAIN,
                FORWARD,
                error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 2 has a total capacity of "
                "79.11 GiB of which 2.44 GiB is free. Including non-PyTorch memory, this process has 76.66 GiB memory in use. Of "
                "the allocated memory 71.20 GiB is allocated by PyTorch, and 4.02 GiB is reserved by PyTorch but unallocated.",
            )
        else:
            log += timed_out(rank, 1337, 744, "_REDUCE_SCATTER_BASE", 58728448, 1200)
        write(f"rank{rank}.log", log)


def symbol():
    write(
        "job.err",
        [
            "Traceback (most recent call last):",
            '  File "/home/user/project/train.py", line 4, in <module>',
            "    import torch",
            '  File "/opt/conda/lib/python3.11/site-packages/torch/__init__.py", line 416, in <module>',
            "    from torch._C import *  # noqa: F403",
            "ImportError: /opt/conda/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",
        ],
    )
    write("pip.txt", ["nvidia-cuda-runtime-cu12==12.8.90", "nvidia-nccl-cu12==2.23.4", "torch==2.9.0", "triton==3.5.0"])


def manager():
    lines = ["[2026-11-26 08:14:02] starting 8 workers on dgx-4"]
    for rank in range(8):
        lines += [
            f"[rank{rank}] /opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py:174: UserWarning: CUDA initialization: "
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might "
            "have already set an error? Error 802: system not yet initialized (Triggered internally at "
            "/pytorch/c10/cuda/CUDAFunctions.cpp:109.)",
            f"[rank{rank}] RuntimeError: No CUDA GPUs are available"
            if rank % 3
            else f"[rank{rank}] waiting for device {rank}",
        ]
    write("worker.log", lines)
    write(
        "systemctl.txt",
        [
            "nvidia-fabricmanager.service - NVIDIA fabric manager service",
            "     Active: failed (Result: exit-code) since Thu 2026-11-26 08:02:40 UTC; 11min ago",
            "nv-fabricmanager[1902]: fabric manager NVIDIA GPU driver interface version 570.124.06 don't match with driver version 570.133.20.",
        ],
    )


def peers():
    log = ["world 4, building the model", "parameters 1.54B", "broadcasting the initial weights"]
    for rank in range(4):
        log += timed_out(rank, 640, 1, "BROADCAST", 1, 600, done=-1 if rank else 0, enqueued=1)
    write("train.log", log)
    table = [
        f"|   {i}  NVIDIA L40S  On | 00000000:{bus}:00.0 Off |  101W / 350W | 1201MiB / 46068MiB | 100% Default |"
        for i, bus in enumerate(("31", "4B", "B1", "CA"))
    ]
    write("nvidia-smi.txt", ["Thu Nov 26 09:09:30 2026", *table])
    write(
        "lspci-acs.txt",
        [
            f"{bus}:01.0 ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
            for bus in ("30", "4a", "b0", "c9")
        ],
    )


def kernel_assert():
    log = [f"{line}" for line in steps(0, 30)]
    for thread in range(60, 68):
        log.append(
            f"/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [241,0,0], thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed."
        )
    log += trace(3, MAIN, FORWARD, error="torch.AcceleratorError: CUDA error: device-side assert triggered")
    log.append(
        "[rank3]:[E1126 09:01:34.118204411 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog "
        "thread terminated with exception: CUDA error: device-side assert triggered"
    )
    write("out.log", log)


def heartbeat():
    log = list(steps(0, 80))
    for second, letter, text in (
        (
            720,
            "E",
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api (for example, CudaEventDestroy), or other deadlock-prone behaviors.",
        ),
        (
            1200,
            "F",
            "[PG ID 0 PG GUID 0(default_pg) Rank 1] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
        ),
    ):
        log.append(
            f"[rank1]:[{letter}1126 {clock(second, 412907123)} ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 1] {text}"
        )
    write("train.log", log)
    write(
        "stack-rank1.txt",
        [
            'Thread 30121 (active+gil): "MainThread"',
            "    encode_batch (fast_bpe/_native.cpp:210)",
            "    tokenize (data/online.py:77)",
            "    main (pretrain.py:201)",
            'Thread 30188 (idle): "pt_nccl_watchdg"',
            "    PyGILState_Ensure (libpython3.11.so)",
        ],
    )


def locked():
    log = []
    for local in range(2):
        pid = 8810 + local
        log += [
            f"n22:{pid}:{pid + 70} [{local}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.41.0.22<0>",
            f"n22:{pid}:{pid + 90} [{local}] misc/ibvwrap.cc:270 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
            f"n22:{pid}:{pid + 90} [{local}] NCCL INFO transport/net_ib.cc:2110 -> 2",
        ]
        log += trace(
            local,
            MAIN,
            error="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled "
            "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        )
        log.append(
            f"[rank{local}]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
        )
    write("n22.log", log)
    write("limits.txt", ["$ srun -w n22 bash -c 'ulimit -l'", "64", "$ srun -w n21 bash -c 'ulimit -l'", "unlimited"])


def link():
    log = list(steps(0, 200, 2))
    for rank in (8, 9, 10, 12, 13, 14, 15):
        log += timed_out(rank, 1830, 6021, "_ALLGATHER_BASE", 4194304, 1200)
    write("slurm-66012.out", log)
    write(
        "kern-a31.log",
        [
            "Nov 26 09:10:04 a31 kernel: NVRM: Xid (PCI:0000:5d:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 7(0x0, 0x10000, 0x0, 0x0, 0x0, 0x0, 0x0)",
            "Nov 26 09:10:04 a31 kernel: NVRM: Xid (PCI:0000:5d:00): 45, pid=77120, name=python, Ch 00000012",
        ],
    )


def noisy():
    log = []
    for rank in range(2):
        head = f"node-a:{4400 + rank}:{4470 + rank} [{rank}] NCCL INFO"
        log += [
            f"{head} NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
            f"{head} Failed to open libibverbs.so[.1]",
            f"{head} NET/IB : No device found.",
            f"{head} NET/Socket : Using [0]eth0:10.0.5.{7 + rank}<0>",
            f"{head} cudaDriverVersion 12080",
            f"{head} TUNER/Plugin: Could not find: libnccl-tuner.so",
            f"{head} Connected all rings, use ring PXN 0 GDR 0",
            f"{head} ncclCommInitRankConfig comm 0x55d1 rank {rank} nranks 2 - Init COMPLETE",
        ]
    log += [
        "[rank0]:[W1126 09:00:02.100322 ProcessGroupNCCL.cpp:5023] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 as device used by this process is currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect."
    ]
    log += steps(0, 40)
    log += ["saved the final weights to runs/7/last"]
    for rank in range(2):
        head = f"node-a:{4400 + rank}:{4495 + rank} [{rank}] NCCL INFO"
        log += [
            f"{head} [Service thread] Connection closed by localRank {1 - rank}",
            f"{head} comm 0x55d1 rank {rank} nranks 2 cudaDev {rank} busId {rank + 1}000 - Abort COMPLETE",
        ]
    log.append(
        "[rank0]:[W1126 09:02:10.771203 ProcessGroupNCCL.cpp:1538] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources."
    )
    write("train.log", log)


def survived_memory():
    log = []
    for batch in (64, 32):
        log += [
            f"trying a batch of {batch}",
            "torch.OutOfMemoryError caught: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 9.1 GiB is free.",
            f"that was too much, halving to {batch // 2}",
        ]
    log += [*steps(0, 64), "validation accuracy 0.731", "finished, best weights in best.pt"]
    write("finetune.log", log)


def tokenising():
    for rank in range(8):
        if rank == 6:
            log = [
                f"2026-11-26 {clock(40 * i)} [rank6] tokenising shard 6: {i * 4000} of 960000 documents"
                for i in range(50)
            ]
        else:
            log = [
                f"2026-11-26 {clock(9)} [rank{rank}] shard {rank} from cache",
                f"2026-11-26 {clock(10)} [rank{rank}] waiting for everybody",
            ]
            log += timed_out(rank, 1812, 3, "ALLREDUCE", 1, 1800, done=2)
        write(f"rank_{rank}.log", log)


def bridge():
    log = []
    for host, rank in (("pod-0", 0), ("pod-1", 1)):
        address = "172.17.0.2" if rank else "10.233.1.4"
        name = "docker0" if rank else "eth0"
        log += [
            f"{host}:101:140 [0] NCCL INFO Bootstrap: Using {name}:{address}<0>",
            f"{host}:101:140 [0] NCCL INFO NET/Socket : Using [0]{name}:{address}<0>",
        ]
    log += [
        "pod-0:101:155 [0] misc/socket.cc:503 NCCL WARN socketStartConnect: Connect to 172.17.0.2<41507> failed : No route to host",
        "pod-0:101:155 [0] NCCL INFO misc/socket.cc:585 -> 2",
    ]
    log += trace(
        0,
        MAIN,
        error="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
    )
    write("pods.log", log)


def ordinal():
    log = ["launching 4 ranks, CUDA_VISIBLE_DEVICES=0,1,2"]
    log += trace(
        3,
        ("/home/user/project/run.py", 18, "<module>", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'),
        (
            "/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py",
            567,
            "set_device",
            "torch._C._cuda_setDevice(device)",
        ),
        error="torch.AcceleratorError: CUDA error: invalid device ordinal",
    )
    log.append("GPU device may be out of range, do you have enough GPUs?")
    for rank in range(3):
        log.append(
            f"W1126 09:00:05.318000 9901 torch/distributed/elastic/multiprocessing/api.py:908] Sending process {9910 + rank} closing signal SIGTERM"
        )
    write("run.log", log)


globals()[sys.argv[1]]()
