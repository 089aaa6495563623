"""Small Ray programs: `ray_program.py WHAT`."""

import os
import signal
import sys
import time

import numpy as np
import ray
from ray.util.placement_group import placement_group

what = sys.argv[1]


@ray.remote(num_cpus=1)
class Trainer:
    def __init__(self, rank):
        self.rank, self.weights = rank, np.zeros(64)

    def step(self, n):
        time.sleep(0.2)
        self.weights += 0.1
        print(f"[rank {self.rank}] update {n} loss {2.0 / (n + 1):.4f} errors=0", flush=True)
        if what == "actor-raises" and self.rank == 1 and n == 6:
            return {"rank": self.rank, "loss": 2.0 / (n - 6)}
        if what == "actor-killed" and self.rank == 0 and n == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "actor-exits" and self.rank == 1 and n == 5:
            sys.exit(3)
        if what == "actor-slow" and self.rank == 1 and n == 4:
            time.sleep(40)
        return {"rank": self.rank, "loss": 2.0 / (n + 1)}

    def done(self):
        print(f"[rank {self.rank}] leaving", flush=True)
        ray.actor.exit_actor()


@ray.remote(max_retries=3)
def fetch(part, folder):
    marker = os.path.join(folder, f"tried-{part}")
    if what == "h-retried" and part % 4 == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "task-raises" and part == 5:
        return open(f"/mnt/shards/part-{part:05d}.tar").read()
    time.sleep(0.3)
    print(f"part {part} fetched", flush=True)
    return np.ones(1000) * part


@ray.remote(max_retries=0)
def grow(step_mb):
    kept = []
    for i in range(1000):
        kept.append(np.ones(step_mb * 2**17))
        time.sleep(0.05)
        if i % 10 == 0:
            print(f"cached {i * step_mb} MB", flush=True)
    return len(kept)


@ray.remote(num_gpus=1)
def on_gpu():
    return 1


def train(updates=12, wait=None):
    trainers = [Trainer.remote(rank) for rank in range(2)]
    for n in range(1, updates + 1):
        answers = ray.get([each.step.remote(n) for each in trainers], timeout=wait)
        print(f"update {n}/{updates} mean loss {sum(one['loss'] for one in answers) / 2:.4f}", flush=True)
    for each in trainers:
        each.done.remote()
    time.sleep(1)
    print("all updates done", flush=True)


def main():
    resources = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    if what == "no-cluster":
        ray.init(address="127.0.0.1:6399")
    if what == "store-too-large":
        resources["object_store_memory"] = 10 * 2**40
    ray.init(**resources)
    if what in {"h-actors", "actor-raises", "actor-killed", "actor-exits"}:
        train()
    elif what == "actor-slow":
        train(wait=15)
    elif what in {"h-retried", "task-raises"}:
        os.makedirs("marks", exist_ok=True)
        parts = [fetch.remote(part, os.path.abspath("marks")) for part in range(12)]
        total = sum(part.sum() for part in ray.get(parts))
        print(f"12 of 12 parts, sum {total:.0f}", flush=True)
    elif what == "infeasible":
        ready, _ = ray.wait([on_gpu.remote()], timeout=40)
        print(f"{len(ready)} of 1 tasks ready after 40 s", flush=True)
        ray.get(on_gpu.remote(), timeout=5)
    elif what == "group-pending":
        group = placement_group([{"CPU": 2}] * 4, strategy="STRICT_PACK")
        print("waiting for the placement group: 4 bundles of 2 CPUs", flush=True)
        ray.get(group.ready(), timeout=40)
    elif what == "memory":
        print(ray.get(grow.remote(40)), flush=True)
    elif what == "object-lost":
        owner = Owner.remote()
        reference = ray.get(owner.make.remote())[0]
        print("first read:", ray.get(reference).sum(), flush=True)
        ray.kill(owner)
        time.sleep(3)
        print("second read:", ray.get(ray.get(Owner.remote().use.remote([reference]))), flush=True)
    elif what == "unpicklable":
        import threading

        lock = threading.Lock()

        @ray.remote
        def work():
            with lock:
                return 1

        print(ray.get(work.remote()))
    elif what == "no-module":

        @ray.remote(runtime_env={"env_vars": {"MODE": "train"}})
        def score():
            import flash_reward_models

            return flash_reward_models.score()

        print("scoring 8 completions", flush=True)
        print(ray.get([score.remote() for _ in range(2)]))
    elif what == "h-cancelled":
        slow = fetch.remote(2, ".")
        pending = [fetch.remote(part, ".") for part in range(20, 40)]
        ray.get(slow)
        for each in pending:
            ray.cancel(each)
        cancelled = 0
        for each in pending:
            try:
                ray.get(each)
            except (ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError) as error:
                cancelled += 1
                print(f"fetch cancelled: {error!r}", flush=True)
        print(f"stopped on purpose: {cancelled} fetches cancelled, enough data", flush=True)
    elif what == "interrupted":
        train(updates=500)


@ray.remote
class Owner:
    def make(self):
        return [ray.put(np.ones(200_000))]

    def use(self, references):
        return ray.get(references[0]).sum()


main()
