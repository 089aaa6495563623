"""Starts the engines, and if needed the scorers and environments, with which a model is used outside of a run."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalClusterConfig
from lockstep.config.model import ModelConfig
from lockstep.config.run_config import RunConfig
from lockstep.data.images.image_store import IMAGE_FOLDER
from lockstep.data.turn_tokenizer import TurnTokenizer
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rewards.scoring_messages import DataColumns
from lockstep.rollout.client.multi_turn import make_client
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import ENGINE_SERVICE
from lockstep.run.errors import RunRefused
from lockstep.run.planning.resources import host_resources
from lockstep.run.planning.worker_preload import PRELOAD_MODULES, WORKER_ENVIRONMENT
from lockstep.watch.beacon.writer import open_beacon


@dataclass(slots=True)
class EngineSession:
    """The running processes."""

    engines: RolloutClient
    rewards: ScorerPool | None
    describe_worker: Callable[[str], str]
    """What the worker of that name is doing, as a verb phrase."""


@contextmanager
def open_session(
    config: RunConfig,
    model: ModelConfig,
    scratch: Path,
    turns: TurnTokenizer | None = None,
    scored: Sequence[DataColumns] | None = None,
) -> Iterator[EngineSession]:
    """Starts the processes on this host and yields them; stops them all at the end. A copy of a model in `scratch` is
    deleted as soon as the engines have loaded it.

    Args:
        config: its sections `rollout`, `reward` and `cluster` are used.
        turns: tokenizes the turns of conversations, with an environment.
        scored: the columns of the datasets whose completions are scored; without them, no scorer is started.

    Raises:
        RunRefused: this host lacks the devices.
        RemoteError, WorkerDied, RewardError, EnvironmentFailed: a process could not start.
    """
    name = new_run_id(config.name)
    limits = config.cluster if config.cluster.kind == "local" else LocalClusterConfig(device=config.cluster.device)
    specs = engine_specs(config, model, limits, scratch / IMAGE_FOLDER)
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, run_shm_dir(name), ignore_errors=True)
        open_beacon(name, "controller", "controller", 0)
        cluster = LocalCluster(limits, name, scratch / "session", 1)
        closing.callback(cluster.close)
        workers = cluster.start(specs)
        if Path(model.path).is_relative_to(scratch):
            shutil.rmtree(model.path)
        engines = make_client(cluster, workers, config.rollout, config.seed, limits.stall_limit_s, turns)
        closing.callback(engines.close)
        rewards = None
        if scored is not None and config.reward is not None:
            rewards = ScorerPool(cluster, config.reward, data=scored, images=scratch / IMAGE_FOLDER)
            rewards.start()
        yield EngineSession(engines, rewards, cluster.describe_worker)


def engine_specs(config: RunConfig, model: ModelConfig, limits: LocalClusterConfig, images: Path) -> list[WorkerSpec]:
    """The engines that the config asks for, at most as many as this host has GPUs for. Raises RunRefused if it has not
    enough for one.

    Args:
        images: the folder of the prepared images of prompts.
    """
    host, engine = host_resources(limits), config.rollout.engine
    width, count = engine.tensor_parallel_size if engine.kind == "vllm" else 1, engine.count
    if host.device == "cuda":
        count = min(count, host.gpus // width)
        if count == 0:
            raise RunRefused(f"the engine needs {width} GPUs, and this host has {host.gpus}: set cluster.device=cpu")
    arguments = {
        "model": model.model_dump(mode="json"),
        "engine": engine.model_dump(mode="json", exclude={"count"}),
        "threads": engine.threads or max(1, host.cores // count),
        "images": str(images),
    }
    devices = [f"cuda:{rank * width}" if host.device == "cuda" else "cpu" for rank in range(count)]
    # A forked process cannot use CUDA that its parent has initialised, so workers with a GPU are not forked.
    preload = PRELOAD_MODULES[engine.kind] if host.device == "cpu" else ()
    return [
        WorkerSpec(
            f"engine-{rank}", "rollout", rank, ENGINE_SERVICE, {**arguments, "device": device},
            dict(WORKER_ENVIRONMENT), preload,
        )
        for rank, device in enumerate(devices)
    ]  # fmt: skip
