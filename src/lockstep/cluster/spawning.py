"""The order for a worker process."""

from collections.abc import Mapping
from concurrent.futures import Future

from lockstep.cluster.node import Node
from lockstep.cluster.remote import RemoteWorker
from lockstep.watch.agent_client import AgentGone


def order(worker: RemoteWorker, environment: Mapping[str, str], note: str, device: str) -> "Future[int]":
    """Has the agent of the worker's node start the process; its pid, which the handle is told as well."""
    node: Node = worker.node
    if node.agent is None:
        raise AgentGone("start", f"{node.info.name} has no agent")
    preload = () if node.uses_cuda(device, environment) else worker.spec.preload
    python, folder = node.place()
    argv = [python, "-m", "lockstep.cluster.worker"]
    pid = node.agent.submit_spawn(
        worker.name, argv, log_path=worker.log, env=environment, cwd=folder, preload=preload, note=note,
        trusted=True,
    )  # fmt: skip
    pid.add_done_callback(lambda done: _set_pid(worker, done))  # in the thread that hears of its end, before it
    return pid


def _set_pid(worker: RemoteWorker, done: "Future[int]") -> None:
    if done.exception() is None:
        worker.pid = done.result(timeout=0)
        worker.moved()  # its stall clock starts with its life, not with the order for it
