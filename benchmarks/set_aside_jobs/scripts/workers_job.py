"""Jobs of Ray: Ray Train, trainer actors, a task that takes too much memory, a node that leaves."""

import logging
import os
import sys
import time
from pathlib import Path

import ray

MODE = sys.argv[1]
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
log = logging.getLogger("driver")


def loop(config):
    import torch
    import torch.distributed as dist
    from ray import train

    rank = train.get_context().get_world_rank()
    for step in range(30):
        grad = torch.randn(100)
        dist.all_reduce(grad)
        struck = config["fault"] == "always" or (config["fault"] == "once" and not Path(config["flag"]).exists())
        if step == 12 and rank == 1 and struck:
            Path(config["flag"]).touch()
            prices = {"a": 1.0}
            prices["b"]
        if step % 6 == 0:
            train.report({"loss": 4.0 - 0.1 * step + rank, "step": step})
        time.sleep(0.1)


def train_loop(fault, workers=2, gpu=False):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"fault": fault, "flag": str(Path("failed.once").resolve())},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name="prices",
            storage_path=str(Path("results").resolve()),
            failure_config=FailureConfig(max_failures=2 if fault == "once" else 0),
        ),
    )
    result = trainer.fit()
    log.info("fit ended, metrics %s", result.metrics)


@ray.remote(num_cpus=1, max_restarts=0)
class PolicyTrainer:
    def __init__(self, rank, port):
        import datetime

        import torch.distributed as dist

        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
        self.rank = rank
        print(f"policy trainer {rank} joined")

    def update(self, step, advantages):
        import torch
        import torch.distributed as dist

        scaled = torch.tensor(advantages)
        if self.rank == 1 and step == 5:
            scaled = scaled.view(3, -1)
        dist.all_reduce(scaled.flatten())
        print(f"rank {self.rank} step {step} pg_loss {float(scaled.mean()):.3f}")


@ray.remote(num_cpus=0)
class Rollouts:
    def __init__(self, number):
        self.number, self.calls = number, 0

    def sample(self, prompt):
        self.calls += 1
        if (self.calls + self.number) % 7 == 0:
            print(f"WARNING tool call of prompt {prompt} timed out after 2.0s, returning an empty observation")
        if self.calls == 9 and self.number == 1:
            raise ConnectionResetError(104, "Connection reset by peer")
        time.sleep(0.05)
        return prompt % 3


def policy():
    trainers = [PolicyTrainer.remote(rank, 28843) for rank in range(2)]
    for step in range(10):
        ray.get([each.update.remote(step, [0.1 * n for n in range(8)]) for each in trainers])


def sampled():
    workers = [Rollouts.remote(number) for number in range(3)]
    for step in range(8):
        refs, done, failed = [workers[n % 3].sample.remote(n) for n in range(12)], [], 0
        for ref in refs:
            try:
                done.append(ray.get(ref))
            except ray.exceptions.RayTaskError as error:
                failed += 1
                log.warning("a rollout failed and is replaced by another prompt: %s", error.cause)
        log.info("step %d: %d rollouts (%d dropped), mean reward %.2f", step, len(done), failed, sum(done) / len(done))


@ray.remote(num_cpus=1, max_retries=0)
def pack_dataset():
    kept = []
    for number in range(40):
        kept.append(bytearray(50_000_000))
        print(f"packed {number} chunks")
        time.sleep(0.5)
    return len(kept)


@ray.remote(num_cpus=1, max_restarts=0)
class Store:
    def put(self, step):
        time.sleep(0.2)
        return step


def leaving():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1, resources={"replay": 1})
    ray.init(address=cluster.address)
    store = Store.options(resources={"replay": 1}, num_cpus=0).remote()
    for step in range(60):
        log.info("stored %d", ray.get(store.put.remote(step)))
        if step == 12:
            cluster.remove_node(node, allow_graceful=False)


def main():
    if MODE == "leaving":
        return leaving()
    ray.init("local" if len(sys.argv) < 3 else None, num_cpus=3, include_dashboard=False)
    if MODE == "memory":
        log.info("packing the dataset on one worker")
        log.info("packed: %s", ray.get(pack_dataset.remote()))
    elif MODE == "policy":
        policy()
    elif MODE == "sampled":
        sampled()
    elif MODE == "no-reward":
        log.info("looking for the reward actor that the service job has made")
        scorer = ray.get_actor("reward_model", namespace="rlhf")
        log.info("got %s", scorer)
    elif MODE == "gpus":
        train_loop("", workers=2, gpu=True)
    else:
        train_loop({"train-once": "once", "train-fails": "always"}[MODE])
    log.info("finished")
    return None


if __name__ == "__main__":
    main()
