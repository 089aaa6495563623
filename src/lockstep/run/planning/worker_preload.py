"""What workers import, and the fork server that shares it with the controller. Imports no torch itself."""

import os
from importlib import import_module

from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.config.run_config import RunConfig
from lockstep.watch.agent.prepared_agent import PreparedAgent, prepare_agent

PRELOAD_MODULES = {
    "builtin": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.engine_service",
                "lockstep.rollout.builtin"),
    "vllm": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.engine_service"),
}  # fmt: skip
"""By the kind of engines: the modules that the fork server of trainer ranks and engines imports. vLLM is imported
by the engines themselves: its import sets up a platform and threads, which trainer ranks must not inherit."""
WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of trainer ranks and engines. Idle OpenMP threads sleep instead of spinning, as the roles take turns on
the same cores. The number of threads is an argument of each service: all workers have the same environment, so that one
fork server serves them all."""


def preload_and_prepare_agent(config: RunConfig) -> PreparedAgent | None:
    """Imports what workers and controller need, and forks the fork server of a run on this host before anything else
    happens. Returns None, with the imports done, if workers cannot be forked from this process: on Ray, with GPUs, and
    where this process is watched or has the run's token in its environment, which workers could read.

    Raises:
        ForkedWorker: in every worker.
    """
    on_host = config.cluster.kind == "local" and config.cluster.device != "cuda"
    if not on_host or any(name.startswith((TOKEN_VARIABLE, "LOCKSTEP_WATCH")) for name in os.environ):
        return None
    before = {name: os.environ.get(name) for name in WORKER_ENVIRONMENT}
    os.environ.update(WORKER_ENVIRONMENT)
    try:
        preload = PRELOAD_MODULES[config.rollout.engine.kind]
        for name in preload:
            import_module(name)
        import torch

        return None if torch.cuda.is_available() else prepare_agent(preload)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
