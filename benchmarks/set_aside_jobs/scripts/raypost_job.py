"""Post-training with Ray actors: rollout workers, a scorer, learners in a gloo group. `raypost_job.py MODE`."""

import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist

MODE = sys.argv[1]
STEPS = 8


@ray.remote(max_restarts=2 if MODE == "restarts" else 0, max_task_retries=2 if MODE == "restarts" else 0)
class RolloutWorker:
    def __init__(self, index):
        self.index = index
        print(f"rollout worker {index} ready, pid {os.getpid()}")

    def sample(self, step):
        if MODE == "restarts" and self.index == 1 and step == 3 and not Path("restarted").exists():
            Path("restarted").touch()
            os._exit(1)
        if MODE == "rollout-killed" and self.index == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "slow-sample" and self.index == 0 and step == 4:
            time.sleep(12)
        print(f"step {step}: 16 rollouts")
        return torch.rand(16)


@ray.remote
class Scorer:
    def score(self, step, rollouts):
        if MODE == "score-key" and step == 3:
            return {"exact": 1.0}["format"]
        return (rollouts > 0.5).float()


@ray.remote
class Learner:
    def __init__(self, rank, world, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo")
        self.rank, self.weight = rank, torch.zeros(4)
        print(f"learner {rank}/{world} joined")

    def update(self, step, scores):
        grad = torch.full((4,), scores.mean().item())
        if MODE == "learner-shape" and self.rank == 1 and step == 5:
            self.weight = self.weight + torch.ones(3)
        dist.all_reduce(grad)
        self.weight = self.weight + 0.1 * grad
        print(f"step {step} loss {1 - grad.mean().item() / 2:.4f}")
        return self.weight.tolist()


def main():
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=True)
    if MODE == "no-room":
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 4, strategy="STRICT_PACK")
        for _ in range(6):
            ready, _ = ray.wait([group.ready()], timeout=6)
            if ready:
                break
            print(f"waiting for the placement group of 4 rollout engines: {ray.available_resources()}", flush=True)
        ray.get(group.ready(), timeout=6)
    workers = [RolloutWorker.remote(index) for index in range(2)]
    scorer = Scorer.remote()
    port = 20000 + os.getpid() % 9000
    learners = [Learner.remote(rank, 2, port) for rank in range(2)]
    for step in range(STEPS):
        rollouts = ray.get([each.sample.remote(step) for each in workers])
        scores = ray.get([scorer.score.remote(step, each) for each in rollouts])
        weights = ray.get([each.update.remote(step, one) for each, one in zip(learners, scores, strict=True)])
        print(f"driver: step {step} done, weight {weights[0][0]:.3f}", flush=True)
    print("driver: training finished", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
