"""Loads DeepSpeed, and lets it use this rank's communicators. Nothing else imports it."""

import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from torch._C._distributed_c10d import HashStore

from lockstep.train.distributed import ParallelContext, new_group_with
from lockstep.train.errors import TrainerUnsupported

SUPPORTED = SpecifierSet(">=0.19.8,<0.20")
"""Versions of DeepSpeed, as in pyproject.toml: the trainer reads the state of its optimizers."""
_BUILT_OPERATIONS = ("deepspeed_shm_comm",)
"""Operations that DeepSpeed would compile at the first collective on a CPU, whatever the stage. gloo does the same."""


def require_deepspeed(field: str) -> None:
    """Raises TrainerUnsupported if DeepSpeed is not installed in a supported version. Does not import it.

    Args:
        field: the field of the config that asks for it.
    """
    remedy = f"install it (pip install 'lockstep-rl[deepspeed]', script/bootstrap --deepspeed), or set {field}=fsdp2"
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise TrainerUnsupported("deepspeed", "training without the package deepspeed", remedy) from None
    # A local part, as of a build from sources, does not matter.
    if Version(Version(found).public) not in SUPPORTED:
        raise TrainerUnsupported("deepspeed", f"deepspeed {found}", f"{SUPPORTED} is tested: {remedy}")


def load_deepspeed(ranks: ParallelContext) -> Any:
    """Returns the module `deepspeed`, which then uses this process's communicators.

    DeepSpeed remembers communicators in globals of its own. Those of an earlier rendezvous are forgotten here.
    """
    set_environment(ranks.device)
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


def _join_second_copy(ranks: ParallelContext, settings: Mapping[str, Any]) -> None:
    """Creates the communicator of the ranks that share a second copy of the parameters, unless DeepSpeed has it. One of
    DeepSpeed's own would not have the time limit. All ranks call it, with the same settings."""
    groups: Any = import_module("deepspeed.utils.groups")
    size, held = settings["zero_optimization"]["zero_hpz_partition_size"], groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    if size == 1:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    elif held is None or dist.get_world_size(held) != size:
        members = torch.arange(ranks.world).view(-1, size).tolist()
        bound = timedelta(seconds=ranks.timeout_s)
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = new_group_with(members, ranks.rank, bound, "second copy")


def set_environment(device: torch.device) -> None:
    """Sets the variables from which DeepSpeed learns its device, also if a launcher set them for its own process."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # DeepSpeed requires that it equals LOCAL_RANK


def make_engine(
    ranks: ParallelContext,
    model: nn.Module,
    settings: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Returns a DeepSpeed engine of a model; without an optimizer, one that only evaluates."""
    deepspeed = load_deepspeed(ranks)
    _join_second_copy(ranks, settings)
    parameters = [each for each in model.parameters() if each.requires_grad] if optimizer is not None else None
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters,
        config=dict(settings),
        dist_init_required=False,
    )
    return engine


def make_partition(ranks: ParallelContext, settings: Mapping[str, Any]) -> Callable[[nn.Parameter], None]:
    """Returns the function that leaves of a parameter what this rank holds at stage 3 (`ds_tensor`).

    The function does not communicate: every rank calls it with the same values, as each has read them from the same
    checkpoint.

    Args:
        settings: of the engine that gets the parameters.
    """
    load_deepspeed(ranks)
    _join_second_copy(ranks, settings)
    zero: Any = import_module("deepspeed.runtime.zero.partition_parameters")
    groups: Any = import_module("deepspeed.utils.groups")
    # Of a module without parameters, as they come one by one. It has the other effects that the settings ask for, such
    # as `memory_efficient_linear`.
    init = zero.Init(
        module=nn.Module(),
        config_dict_or_path=dict(settings),
        zero_param_parallel_group=groups._ZERO_PARAM_INTRA_PARALLEL_GROUP,
    )

    def partition(parameter: Any) -> None:
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return partition


def _join_alone(ranks: ParallelContext) -> None:
    """DeepSpeed needs a communicator also for a single rank."""
    if not dist.is_initialized():
        limit = timedelta(seconds=ranks.timeout_s)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=limit)
