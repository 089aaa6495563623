"""The functions of torch.distributed that communicate, and what of their arguments must agree between members.

Torch has renamed several and kept the old names; a table by name, with positions read from the signatures that the
installed version has, fits them all.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.watch.tape import SEPARATOR


@dataclass(frozen=True)
class Form:
    """One operation, whatever it is called."""

    operation: str
    tensor: tuple[str, ...] = ()
    """Names of the parameter whose shape and dtype count, a tensor or a list of them; of the first that exists."""
    root: tuple[str, ...] = ()
    """Parameters that name the root: the first counts global ranks, the second those of the communicator."""
    peer: tuple[str, ...] = ()
    """The same for a point-to-point call, which is no collective."""
    sized: bool = True
    """False where members may give different shapes."""
    p2p: bool = False
    unseen: bool = False
    """c10d neither records nor counts it with gloo, though its sequence number moves."""


_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
_GATHER = Form("all_gather_into_tensor", ("input_tensor", "input"))
_SCATTER = Form("reduce_scatter_tensor", ("input", "input_tensor"))

FORMS: dict[str, Form] = {
    "all_reduce": Form("all_reduce", ("tensor",)),
    "all_reduce_coalesced": Form("all_reduce_coalesced", ("tensors",)),
    "broadcast": Form("broadcast", ("tensor",), root=_SOURCE),
    "reduce": Form("reduce", ("tensor",), root=_TARGET),
    "all_gather": Form("all_gather", ("tensor",)),
    "all_gather_coalesced": Form("all_gather_coalesced", ("input_tensor_list",)),
    "all_gather_into_tensor": _GATHER,
    "all_gather_single": _GATHER,
    "_all_gather_base": _GATHER,
    "gather": Form("gather", ("tensor",), root=_TARGET),
    "scatter": Form("scatter", ("tensor",), root=_SOURCE),
    "reduce_scatter": Form("reduce_scatter", ("input_list",)),
    "reduce_scatter_tensor": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "all_to_all_single": Form("all_to_all_single", ("input", "input_tensor"), sized=False),
    "all_to_all": Form("all_to_all", ("input_tensor_list",), sized=False),
    "barrier": Form("barrier"),
    "monitored_barrier": Form("monitored_barrier", unseen=True),
    "all_gather_object": Form("all_gather_object"),
    "gather_object": Form("gather_object", root=_TARGET),
    "broadcast_object_list": Form("broadcast_object_list", root=_SOURCE),
    "scatter_object_list": Form("scatter_object_list", root=_SOURCE),
    "send": Form("send", ("tensor",), peer=_TARGET, p2p=True),
    "recv": Form("recv", ("tensor",), peer=_SOURCE, p2p=True),
    "isend": Form("isend", ("tensor",), peer=_TARGET, p2p=True),
    "irecv": Form("irecv", ("tensor",), peer=_SOURCE, p2p=True),
    "send_object_list": Form("send_object_list", peer=_TARGET, p2p=True),
    "recv_object_list": Form("recv_object_list", peer=_SOURCE, p2p=True),
    "batch_isend_irecv": Form("batch_isend_irecv", p2p=True),
}

FUNCTIONAL: dict[str, Form] = {
    "all_reduce": Form("all_reduce", ("self",)),
    "broadcast": Form("broadcast", ("self",), root=("src",)),
    "all_gather_tensor": Form("all_gather_into_tensor", ("self",)),
    "all_gather_single": Form("all_gather_into_tensor", ("self",)),
    "all_gather_tensor_autograd": Form("all_gather_into_tensor", ("self",)),
    "all_gather_single_autograd": Form("all_gather_into_tensor", ("self",)),
    "reduce_scatter_tensor": Form("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_single": Form("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_tensor_autograd": Form("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_single_autograd": Form("reduce_scatter_tensor", ("self",)),
    "all_reduce_coalesced": Form("all_reduce_coalesced", ("self",)),
    "all_gather_into_tensor_coalesced": Form("all_gather_coalesced", ("self",)),
    "all_gather_single_coalesced": Form("all_gather_coalesced", ("self",)),
    "reduce_scatter_tensor_coalesced": Form("reduce_scatter_coalesced", ("inputs",)),
    "reduce_scatter_single_coalesced": Form("reduce_scatter_coalesced", ("inputs",)),
    "all_to_all_single": Form("all_to_all_single", ("self",), sized=False),
    "all_to_all_single_autograd": Form("all_to_all_single", ("self",), sized=False),
}
"""Of torch.distributed._functional_collectives, which DTensor and tensor parallelism call from Python."""


class Places:
    """Where a function of the installed torch takes what we look at."""

    __slots__ = ("group", "peer", "root", "tensor")

    def __init__(self, function: Callable[..., Any], form: Form) -> None:
        names = list(inspect.signature(function).parameters)
        self.group = _place(names, ("group",))
        self.tensor = _place(names, form.tensor)
        self.root = [_place(names, (name,)) for name in form.root if name in names]
        self.peer = [_place(names, (name,)) for name in form.peer if name in names]


Place = tuple[int, str]
_NOWHERE: Place = (1 << 30, "")


def _place(names: list[str], wanted: tuple[str, ...]) -> Place:
    for name in wanted:
        if name in names:
            return names.index(name), name
    return _NOWHERE


def given(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a place, None when it was not given."""
    at, name = place
    return args[at] if at < len(args) else kwargs.get(name)


def rank_given(
    places: Sequence[Place], args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
) -> int | None:
    """The root or peer as a rank of the communicator whose global ranks are `ranks`; None when it was not given."""
    for number, place in enumerate(places):
        rank = given(place, args, kwargs)
        if rank is not None:
            if number == 0 and ranks:
                return ranks.index(rank) if rank in ranks else None
            return int(rank)
    return None


def describe(form: Form, tensors: Any, root: int | None, module: str = "") -> tuple[int, str]:
    """64-bit signature and text of a call. `tensors` is a tensor, a list of them, or None; the module is told, and no
    part of the signature."""
    shapes, dtype = "", ""
    if tensors is not None:
        each = [tensors] if hasattr(tensors, "dtype") else list(tensors)
        dtype = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in each}))
        shapes = ", ".join(str(list(tensor.shape)) for tensor in each) if form.sized else ""
    root_text = "" if root is None else str(root)
    signature = digest(SEPARATOR.join([form.operation, dtype, root_text, shapes]))
    return signature, SEPARATOR.join([form.operation, dtype, root_text, module, shapes])


def digest(text: str) -> int:
    """64 bits of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
