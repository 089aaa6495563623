"""Loads DeepSpeed, and lets it use this rank's communicators. Nothing else imports it."""

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import TrainerUnsupported

_BUILT_OPERATIONS = ("deepspeed_shm_comm",)
"""Operations that DeepSpeed would compile at the first collective on a CPU, whatever the stage. gloo does the same."""


def require_deepspeed(field: str) -> None:
    """Raises TrainerUnsupported if DeepSpeed is not installed. Does not import it.

    Args:
        field: the field of the config that asks for it.
    """
    if find_spec("deepspeed") is None:
        remedy = (
            f"install it (pip install 'lockstep-rl[deepspeed]', script/bootstrap --deepspeed), or set {field}=fsdp2"
        )
        raise TrainerUnsupported("deepspeed", "training without the package deepspeed", remedy)


def load_deepspeed(ranks: ParallelContext) -> Any:
    """Returns the module `deepspeed`, which then uses this process's communicators.

    DeepSpeed remembers communicators in globals of its own. Those of an earlier rendezvous are forgotten here.
    """
    # Assigned: what a launcher left in the environment is about its own process.
    os.environ["DS_ACCELERATOR"] = ranks.device.type
    os.environ["LOCAL_RANK"] = str(ranks.device.index or 0)
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # it would be used instead of LOCAL_RANK
    _join_alone(ranks)
    deepspeed = import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    known = import_module("deepspeed.ops").__compatible_ops__
    for operation in _BUILT_OPERATIONS:
        known[operation] = False
    groups: Any = import_module("deepspeed.utils.groups")
    comm: Any = import_module("deepspeed.comm.comm")
    world = dist.group.WORLD
    if groups._WORLD_GROUP is not world:
        groups._release_process_group_references()
        comm.cdb = None
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        # Instead of a copy of this communicator, which would not have its time limit.
        groups._WORLD_GROUP = world
    return deepspeed


def make_engine(
    ranks: ParallelContext,
    model: nn.Module,
    settings: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Returns a DeepSpeed engine of a model; without an optimizer, one that only evaluates."""
    deepspeed = load_deepspeed(ranks)
    parameters = [each for each in model.parameters() if each.requires_grad] if optimizer is not None else None
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters,
        config=dict(settings),
        dist_init_required=False,
    )
    return engine


def _join_alone(ranks: ParallelContext) -> None:
    """DeepSpeed needs a communicator also for a single rank."""
    if not dist.is_initialized():
        limit = timedelta(seconds=ranks.timeout_s)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=limit)
