"""Small jobs of Ray's libraries: Train, Tune, Data, Serve, actors and placement groups."""

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import ray

SYSTEM = {"health_check_period_ms": 2000, "health_check_failure_threshold": 4}


def train_loop(config):
    import torch
    from ray import train

    context = train.get_context()
    rank = context.get_world_rank()
    net = torch.nn.Linear(8, 1)
    model = train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(config["epochs"]):
        rows = read_partition(config["partitions"][rank])
        for row in rows:
            loss = (model(torch.tensor([row["x"]])) - row["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        time.sleep(config["sleep"])
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}")
        train.report({"loss": loss.item(), "epoch": epoch})


def read_partition(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_partitions(folder, bad=False):
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(2):
        lines = [json.dumps({"x": [0.1 * (n % 7)] * 8, "y": 0.5}) for n in range(40)]
        if bad and number == 1:
            lines[27] = lines[27][: len(lines[27]) // 2]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
        paths.append(str((folder / f"part-{number}.jsonl").resolve()))
    return paths


def run_train(args):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config = {
        "epochs": args.epochs,
        "sleep": args.sleep,
        "partitions": write_partitions(Path("parts"), args.bad_partition),
    }
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=args.gpu, resources_per_worker={"CPU": args.worker_cpus}),
        run_config=RunConfig(
            name="linear",
            storage_path=str(Path("results").resolve()),
            failure_config=FailureConfig(max_failures=args.failures),
        ),
    )
    print(trainer.fit().metrics)


def trial(config):
    from ray import tune

    value = 10.0
    for step in range(8):
        time.sleep(0.1)
        value = value * (1 - config["lr"])
        if config["lr"] > config["limit"]:
            raise ZeroDivisionError(f"variance of batch {step} is 0 for lr={config['lr']}")
        tune.report({"loss": value, "step": step})


def run_tune(args):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    space = {"lr": tune.grid_search([0.05, 0.1, 0.3, 0.6]), "limit": args.lr_limit}
    tuner = tune.Tuner(
        trial,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="step", max_t=8, grace_period=2),
            max_concurrent_trials=2,
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=str(Path("results").resolve())),
    )
    results = tuner.fit()
    print("errors:", results.num_errors, "best:", results.get_best_result().config["lr"])


def tokenize(batch):
    time.sleep(0.05)
    batch["tokens"] = [len(text.encode("utf-8").split(b" ")) for text in batch["text"]]
    return batch


def run_data(args):
    folder = Path("texts")
    folder.mkdir(exist_ok=True)
    for number in range(8):
        lines = [json.dumps({"text": f"row {n} of file {number}", "id": n}) for n in range(50)]
        if args.bad_file and number == 5:
            lines[13] = '{"text": "row 13 of fi'
        if args.null_row and number == 3:
            lines[20] = json.dumps({"text": None, "id": 20})
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    rows = ray.data.read_json(str(folder), lines=True) if args.lines else ray.data.read_json(str(folder))
    done = rows.map_batches(tokenize, batch_size=25).materialize()
    print("rows:", done.count(), "tokens:", done.sum("tokens"))


def run_group(args):
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 1, "GPU": args.gpus}] * args.bundles, strategy=args.strategy)
    print("waiting for placement group", group.id.hex()[:12], flush=True)
    ready, _ = ray.wait([group.ready()], timeout=args.patience)
    if not ready:
        print(ray.cluster_resources())
        raise TimeoutError(f"placement group of {args.bundles} bundles not ready after {args.patience} s")
    print("placement group is ready")


@ray.remote(max_restarts=2, max_task_retries=2)
class Rollout:
    def __init__(self, number):
        self.number, self.count = number, 0

    def pid(self):
        return os.getpid()

    def sample(self, step, sleep=0.2, hoard=0):
        self.count += 1
        kept = []
        for _ in range(hoard):
            kept.append(bytearray(os.urandom(1 << 20)) * 100)
            time.sleep(0.05)
        time.sleep(sleep)
        return step * 10 + self.number


@ray.remote
class Judge:
    def __init__(self, path=None):
        self.vocabulary = json.loads(Path(path).read_text()) if path else {}

    def set_peer(self, peer):
        self.peer = peer

    def ask(self, depth):
        return ray.get(self.peer.ask.remote(depth - 1)) if depth else 1


def run_actors(args):
    actors = [Rollout.remote(n) for n in range(2)]
    pids = ray.get([each.pid.remote() for each in actors])
    for step in range(args.steps):
        if step == args.kill_at:
            os.kill(pids[1], signal.SIGKILL)
        hoards = [0, args.hoard if step == 3 else 0]
        calls = [each.sample.remote(step, args.sleep, hoard) for each, hoard in zip(actors, hoards, strict=True)]
        print(f"step {step}: {ray.get(calls, timeout=args.patience)}", flush=True)
    print("done")


def run_judges(args):
    if args.missing:
        judge = Judge.remote("/mnt/share/judge/vocab.json")
        print(ray.get(judge.ask.remote(0)))
    first, second = Judge.remote(), Judge.remote()
    ray.get([first.set_peer.remote(second), second.set_peer.remote(first)])
    print("judges are up", flush=True)
    print(ray.get(first.ask.remote(3), timeout=args.patience))


def run_serve(args):
    import urllib.request

    from ray import serve

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.2}, health_check_timeout_s=10)
    class Scorer:
        def __init__(self, weights):
            self.weights = Path(weights).read_text() if weights else ""

        async def __call__(self, request):
            return {"score": len(await request.body())}

    serve.run(Scorer.bind(args.weights), name="scorer")
    for number in range(6):
        with urllib.request.urlopen("http://127.0.0.1:8000/", data=b"x" * number, timeout=20) as answer:
            print(number, answer.read().decode(), flush=True)
    serve.shutdown()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("what")
    for name, default in {
        "epochs": 5,
        "worker_cpus": 1,
        "failures": 0,
        "gpus": 0,
        "bundles": 2,
        "patience": 40,
        "steps": 8,
        "kill_at": -1,
        "hoard": 0,
        "cpus": 4,
    }.items():
        options.add_argument(f"--{name}", type=int, default=default)
    for name in ("gpu", "bad_partition", "bad_file", "null_row", "lines", "missing", "kill_raylet"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--sleep", type=float, default=0.3)
    options.add_argument("--lr_limit", type=float, default=1.0)
    options.add_argument("--memory_threshold", type=float, default=0.0)
    options.add_argument("--weights", default="")
    options.add_argument("--strategy", default="PACK")
    args = options.parse_args()
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    ray.init(
        num_cpus=args.cpus,
        include_dashboard=False,
        _temp_dir=folder,
        object_store_memory=120 << 20,
        _system_config=SYSTEM,
    )
    if args.kill_raylet:
        import threading

        pid = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        threading.Timer(12, os.kill, (pid, signal.SIGKILL)).start()
    {
        "train": run_train,
        "tune": run_tune,
        "data": run_data,
        "group": run_group,
        "actors": run_actors,
        "judges": run_judges,
        "serve": run_serve,
    }[args.what](args)
    ray.shutdown()


if __name__ == "__main__":
    main()
