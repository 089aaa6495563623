"""Checks whether the installed torch has the functions and parameters that the recorder relies on."""

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.watch.recorder.operations import OPERATIONS, Operation

CREATE_GROUP = "_new_process_group_helper"
CREATE_PARAMETERS = ("global_ranks_in_group", "group_name", "group_desc")
_WORLD = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")


class TorchDoesNotFit(Exception):
    """The recorder cannot find communicators in this torch. The text says what torch lacks."""


def missing_parameters(function: Callable[..., Any], operation: Operation) -> list[str]:
    """The parameters of an operation that a function of torch lacks, each as its possible names."""
    names = inspect.signature(function).parameters
    batch = operation.name == "batch_isend_irecv"
    wanted = [("p2p_op_list",)] if batch else [("group",), operation.tensor, operation.root, operation.peer]
    return [" or ".join(each) for each in wanted if each and not any(name in names for name in each)]


def check_torch(c10d: Any) -> list[str]:
    """What the recorder cannot record with this torch, as text. `c10d` is torch.distributed.distributed_c10d.

    Raises:
        TorchDoesNotFit: communicators cannot be found at all.
    """
    create = getattr(c10d, CREATE_GROUP, None)
    parameters = inspect.signature(create).parameters if create is not None else ()
    gaps = [f"{CREATE_GROUP} has no parameter {name!r}" for name in CREATE_PARAMETERS if name not in parameters]
    gaps += [f"_world has no {name!r}" for name in _WORLD if not hasattr(getattr(c10d, "_world", None), name)]
    if gaps:
        raise TorchDoesNotFit("; ".join(gaps))
    found = []
    for name, operation in OPERATIONS.items():
        function = getattr(c10d, name, None)
        missing = missing_parameters(function, operation) if inspect.isfunction(function) else []
        if missing:
            found.append(f"{name} has no parameter {', '.join(missing)}: its calls are not recorded")
    return found


def create_arguments(create: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that creates a communicator, by name."""
    bound = inspect.signature(create).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: bound.arguments[name] for name in CREATE_PARAMETERS}
