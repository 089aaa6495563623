"""The programs of test_recorder's ranks."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.reader import read_beacon, read_calls
from lockstep.watch.beacon.writer import close_beacon, current_beacon
from lockstep.watch.recorder import abort, recorder
from tests.faults.ranks import BOUND_S, RUN, Job


def settle(job: Job) -> None:
    """Wait until c10d's threads have counted completed calls, which they do after the calls return."""
    job.synchronize()
    end = time.monotonic() + BOUND_S
    while True:
        recorder.current().poll_once()
        known = read_beacon(current_beacon().path).communicators
        if all(each.closed or each.entered <= max(0, each.completed) for each in known) or time.monotonic() > end:
            return
        time.sleep(0.02)


def everything(rank: int, job: Job) -> Any:
    """Call every operation that the backend has, in an order that the test knows."""
    job.init(rank)
    second = dist.new_group([0, 1], group_desc="second")
    dist.new_group([0, 1], group_desc="unused")
    four, eight = torch.ones(4), torch.ones(8)
    dist.all_reduce(four)
    dist.broadcast(four, 1)
    dist.barrier()
    _pass_messages(rank, job)
    if not job.on_device:
        dist.monitored_barrier()
    with job.reading_results():
        dist.all_gather_object([None, None], {"a": 1})
        dist.broadcast_object_list([rank], 0)
        dist.gather_object(rank, [None, None] if rank == 0 else None, 0)
    dist.all_gather([torch.empty(4), torch.empty(4)], four)
    dist.all_gather_into_tensor(eight, four)
    dist.reduce_scatter_tensor(four, eight)
    dist.gather(four, [torch.empty(4), torch.empty(4)] if rank == 1 else None, dst=1)
    dist.scatter(four, [four, four] if rank == 0 else None, src=0)
    dist.reduce(four, 0, group=second)
    dist.all_reduce(four.double(), group=second, async_op=True).wait()
    dist.all_to_all_single(eight, torch.ones(8))
    from torch.distributed import _functional_collectives as funcol

    funcol.wait_tensor(funcol.all_reduce(four, "sum", dist.group.WORLD))
    found = recorder.current()
    assert found is not None
    settle(job)
    return {
        "troubles": found.failures,
        "missing": found.missing,
        "raw": dist.group.WORLD._get_sequence_number_for_group(),
    }


def _pass_messages(rank: int, job: Job) -> None:
    four, other = torch.ones(4), 1 - rank
    if rank == 0:
        dist.send(four, 1)
        dist.isend(four, 1).wait()
    else:
        dist.recv(four, 0)
        dist.irecv(four, 0 if job.on_device else None).wait()  # NCCL has no receive from any source
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, four, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
    ):
        work.wait()


def ddp(rank: int, job: Job) -> Any:
    """Run DDP, whose collectives are issued from C++ only."""
    job.init(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(5):
        model.zero_grad()
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        mean = 2.0 * sum(range(1, job.world + 1)) / job.world
        assert torch.equal(model.module.weight.grad, torch.full((4, 4), mean))
    dist.barrier()
    settle(job)
    return dist.group.WORLD._get_sequence_number_for_group()


def fsdp(rank: int, job: Job) -> Any:
    """FSDP2 over two layers, three steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    job.init(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (job.world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    settle(job)
    return dist.group.WORLD._get_sequence_number_for_group()


def tensor_parallel(rank: int, job: Job) -> Any:
    """Functional collectives, issued by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    job.init(rank)
    mesh = init_device_mesh("cpu", (job.world,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    settle(job)
    return dist.group.WORLD._get_sequence_number_for_group()


def compiled(rank: int, job: Job) -> Any:
    """Run a collective inside torch.compile: torch traces it as without the recorder."""
    job.init(rank)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    traced = torch.compile(step, backend="eager", fullgraph=True)
    return traced(torch.ones(3)).tolist()


def diverging(rank: int, job: Job) -> Any:
    """Two matching collectives, then rank 1 makes another call than rank 0 has entered before."""
    job.init(rank, refuse=True)
    same = dist.new_group(group_desc="fsdp")
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=same)
    if rank == 1:
        job.wait()
    how = Path(job.folder, "how").read_text()
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=same)
        dist.broadcast(torch.ones(4), 0, group=same)
        job.synchronize()
    elif how == "skip":
        dist.broadcast(torch.ones(4), 0, group=same)
    elif how == "extra":
        dist.all_reduce(torch.ones(4), group=same)
        dist.all_reduce(torch.ones(4), group=same)
    elif how == "operation":
        dist.barrier(group=same)
    elif how == "shape":
        dist.all_reduce(torch.ones(400), group=same)
    elif how == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.float64), group=same)
    return "went on"


def other_root(rank: int, job: Job) -> Any:
    job.init(rank, refuse=True)
    if rank == 1:
        job.wait()
    dist.broadcast(torch.ones(4), src=rank)
    job.synchronize()
    return "went on"


def in_step(rank: int, job: Job) -> Any:
    """Many matching collectives on two communicators, with one rank ahead: none is refused."""
    job.init(rank, refuse=True)
    second = dist.new_group(group_desc="second")
    calls = 100 if job.on_device else 700
    works = [dist.all_reduce(torch.ones(4), group=second, async_op=True) for _ in range(calls)]
    for number in range(calls):
        dist.all_reduce(torch.ones(1 + number % 5))
    for work in works:
        work.wait()
    job.synchronize()
    return recorder.current().failures


def crossed(rank: int, job: Job) -> Any:
    """Each rank waits for the other on another communicator."""
    job.init(rank)
    one, two = dist.new_group(group_desc="one"), dist.new_group(group_desc="two")
    for group in (one, two) if rank == 0 else (two, one):
        dist.all_reduce(torch.ones(4), group=group)
    job.synchronize()


def receiving(rank: int, job: Job) -> Any:
    """Rank 1 waits for a message that rank 0 sends when the test says so; a collective follows."""
    job.init(rank)
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    job.synchronize()
    if rank == 0:
        job.wait()
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
        job.synchronize()
    dist.all_reduce(value)
    settle(job)


def stuck(rank: int, job: Job) -> Any:
    """All ranks but the last wait in the third collective; the last fails as the option says."""
    job.init(rank)
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    if rank < job.world - 1:
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(4))
            job.synchronize()
        finally:
            Path(job.folder, f"freed-{rank}").write_text(str(time.monotonic()))
        return time.monotonic() - started
    settle(job)
    Path(job.folder, "absent").touch()
    if Path(job.folder, "how").read_text() == "gil":
        ctypes.PyDLL(None).sleep(int(BOUND_S))
    job.wait()
    return None


def frozen_in_background(rank: int, job: Job) -> Any:
    """Rank 1 holds the interpreter lock as soon as a collective in the background is over, which the recorder's thread
    cannot see any more; rank 0 waits for it in the next collective of another communicator."""
    job.init(rank)
    second = dist.new_group(group_desc="second")
    parts = [torch.zeros(4), torch.zeros(4)]
    for _ in range(2):
        settle(job)
        dist.all_gather(parts, torch.ones(4), group=second, async_op=True).wait()
    if rank == 1:
        ctypes.PyDLL(None).sleep(int(BOUND_S))
    settle(job)
    dist.all_reduce(torch.ones(4))


def waits_on_work(rank: int, job: Job) -> Any:
    """Like `stuck`, in `Work.wait` of an asynchronous collective."""
    job.init(rank)
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    job.wait()


def hardened(rank: int, job: Job) -> Any:
    """The options of gloo's sockets after a collective."""
    import socket

    job.init(rank, keepalive=True)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.5)
    found = []
    with abort._gloo_sockets(None, None) as taken:
        for each in taken:
            found.append(
                [
                    each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                ]
            )
    dist.barrier()
    return found


def in_a_namespace(rank: int, job: Job) -> Any:
    """Run in a network namespace that the test connects. Rank 0 waits in a collective for rank 1, which does not enter
    it."""
    assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0  # CLONE_NEWNET
    Path(job.folder, f"apart-{rank}").touch()
    until = time.monotonic() + BOUND_S
    while not Path(job.folder, "connected").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    job.init(rank, keepalive=True)
    dist.all_reduce(torch.ones(4))
    abort.enable_keepalive()
    Path(job.folder, f"met-{rank}").touch()
    if rank == 1:
        job.wait()
        return None
    dist.all_reduce(torch.ones(4))
    return None


def failing_recorder(rank: int, job: Job) -> Any:
    """The beacon becomes unusable in the middle: the job continues."""
    job.init(rank, refuse=True)
    dist.all_reduce(torch.ones(4))
    found = recorder.current()
    close_beacon()
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    job.synchronize()
    time.sleep(0.3)
    return {"sum": value[0].item(), "troubles": found.failures}


def with_child(rank: int, job: Job) -> Any:
    """A forked child (a data loader's worker) writes nothing into its parent's beacon."""
    job.init(rank)
    dist.all_reduce(torch.ones(4))
    child = os.fork()
    if child == 0:
        patched = hasattr(dist.all_reduce, "__lockstep__")
        os._exit(7 if patched or recorder.current() is not None else 0)
    _, status = os.waitpid(child, 0)
    dist.all_reduce(torch.ones(4))
    job.synchronize()
    calls = read_calls(run_shm_dir(RUN) / f"policy-{rank}.beacon", 0)
    return {"child": os.waitstatus_to_exitcode(status), "calls": [call.operation for call in calls]}


def again(rank: int, job: Job) -> Any:
    """Destroy communicators and create them again in the same process."""
    job.init(rank, refuse=True)
    dist.all_reduce(torch.ones(4))
    job.synchronize()
    dist.destroy_process_group()
    store = dist.FileStore(
        str(Path(job.folder, "second store")), job.world
    )  # the first one deletes its file at its end
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world)
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    settle(job)
    found = read_beacon(current_beacon().path)
    loops = len(abort.gloo_threads())
    return [[each.closed, each.entered, each.identity] for each in found.communicators], loops
