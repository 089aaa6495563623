"""The operations of torch.distributed: the functions that communicate, the arguments that must agree between members,
and the line of the program that issued a call.

Torch has renamed several functions and kept the old names. The tables contain all names; the positions of arguments
are read from the signatures of the installed version.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lockstep.watch.beacon.beacon_records import SEPARATOR, digest64
from lockstep.watch.beacon.call_ring import CallRings


@dataclass(frozen=True)
class Operation:
    """An operation, which torch may offer under several names."""

    name: str
    tensor: tuple[str, ...] = ()
    """Possible names of the parameter (a tensor or a list) whose shape and dtype are compared; the first one that the
    function has is used."""
    root: tuple[str, ...] = ()
    """Parameters with the root: the first as a global rank, the second as a rank in the communicator."""
    peer: tuple[str, ...] = ()
    """Parameters with the peer of a point-to-point call, in the same order."""
    sized: bool = True
    """False if members may pass different shapes."""
    p2p: bool = False
    uncounted: bool = False
    """True if c10d with gloo neither records nor counts the call, although the sequence number advances."""


_SOURCE, _TARGET = ("src", "group_src"), ("dst", "group_dst")
_GATHER = Operation("all_gather_into_tensor", ("input_tensor", "input"))
_SCATTER = Operation("reduce_scatter_tensor", ("input", "input_tensor"))

OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", ("tensor",)),
    "all_reduce_coalesced": Operation("all_reduce_coalesced", ("tensors",)),
    "broadcast": Operation("broadcast", ("tensor",), root=_SOURCE),
    "reduce": Operation("reduce", ("tensor",), root=_TARGET),
    "all_gather": Operation("all_gather", ("tensor_list",)),  # the inputs' sizes may differ
    "all_gather_coalesced": Operation("all_gather_coalesced", ("input_tensor_list",)),
    "all_gather_into_tensor": _GATHER,
    "all_gather_single": _GATHER,
    "_all_gather_base": _GATHER,
    "gather": Operation("gather", ("tensor",), root=_TARGET),
    "scatter": Operation("scatter", ("tensor",), root=_SOURCE),
    "reduce_scatter": Operation("reduce_scatter", ("input_list",)),
    "reduce_scatter_tensor": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "all_to_all_single": Operation("all_to_all_single", ("input", "input_tensor"), sized=False),
    "all_to_all": Operation("all_to_all", ("input_tensor_list",), sized=False),
    "barrier": Operation("barrier"),
    "monitored_barrier": Operation("monitored_barrier", uncounted=True),
    "all_gather_object": Operation("all_gather_object"),
    "gather_object": Operation("gather_object", root=_TARGET),
    "broadcast_object_list": Operation("broadcast_object_list", root=_SOURCE),
    "scatter_object_list": Operation("scatter_object_list", root=_SOURCE),
    "send": Operation("send", ("tensor",), peer=_TARGET, p2p=True),
    "recv": Operation("recv", ("tensor",), peer=_SOURCE, p2p=True),
    "isend": Operation("isend", ("tensor",), peer=_TARGET, p2p=True),
    "irecv": Operation("irecv", ("tensor",), peer=_SOURCE, p2p=True),
    "send_object_list": Operation("send_object_list", peer=_TARGET, p2p=True),
    "recv_object_list": Operation("recv_object_list", peer=_SOURCE, p2p=True),
    "batch_isend_irecv": Operation("batch_isend_irecv", p2p=True),
}

FUNCTIONAL_OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", ("self",)),
    "broadcast": Operation("broadcast", ("self",), root=("src",)),
    "all_gather_tensor": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_single": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_tensor_autograd": Operation("all_gather_into_tensor", ("self",)),
    "all_gather_single_autograd": Operation("all_gather_into_tensor", ("self",)),
    "reduce_scatter_tensor": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_single": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_tensor_autograd": Operation("reduce_scatter_tensor", ("self",)),
    "reduce_scatter_single_autograd": Operation("reduce_scatter_tensor", ("self",)),
    "all_reduce_coalesced": Operation("all_reduce_coalesced", ("self",)),
    "all_gather_into_tensor_coalesced": Operation("all_gather_coalesced", ("self",)),
    "all_gather_single_coalesced": Operation("all_gather_coalesced", ("self",)),
    "reduce_scatter_tensor_coalesced": Operation("reduce_scatter_coalesced", ("inputs",)),
    "reduce_scatter_single_coalesced": Operation("reduce_scatter_coalesced", ("inputs",)),
    "all_to_all_single": Operation("all_to_all_single", ("self",), sized=False),
    "all_to_all_single_autograd": Operation("all_to_all_single", ("self",), sized=False),
}
"""The functions of torch.distributed._functional_collectives, which DTensor and tensor parallelism call."""


class ArgumentPositions:
    """The positions of the arguments that are recorded, in the installed torch's signature of a function."""

    __slots__ = ("group", "peer", "root", "tensor")

    def __init__(self, function: Callable[..., Any], operation: Operation) -> None:
        names = list(inspect.signature(function).parameters)
        self.group = _find_position(names, ("group",))
        self.tensor = _find_position(names, operation.tensor)
        self.root = [_find_position(names, (name,)) for name in operation.root if name in names]
        self.peer = [_find_position(names, (name,)) for name in operation.peer if name in names]


ArgumentPosition = tuple[int, str]
_NO_POSITION: ArgumentPosition = (1 << 30, "")


def _find_position(names: list[str], candidates: tuple[str, ...]) -> ArgumentPosition:
    for name in candidates:
        if name in names:
            return names.index(name), name
    return _NO_POSITION


def get_argument(position: ArgumentPosition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a position; None if it was not passed."""
    at, name = position
    return args[at] if at < len(args) else kwargs.get(name)


def get_rank_argument(
    positions: Sequence[ArgumentPosition], args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
) -> int | None:
    """The root or peer as a rank in the communicator of the global ranks `ranks`; None if it was not passed."""
    return find_rank([get_argument(position, args, kwargs) for position in positions], ranks)


def find_rank(given: Sequence[Any], ranks: Sequence[int]) -> int | None:
    """The rank in the communicator of the global ranks `ranks`; None if it was not given.

    Args:
        given: the rank as a global one, then as one in the communicator; of these, one is not None.
    """
    for number, rank in enumerate(given):
        if rank is not None:
            if number == 0 and ranks:
                return ranks.index(rank) if rank in ranks else None
            return int(rank)
    return None


def describe_call(operation: Operation, tensors: Any, root: int | None, module: str = "") -> tuple[int, str]:
    """The 64-bit signature and the text of a call. `tensors` is a tensor, a list of tensors, or None. The module is
    part of the text, not of the signature. Of the shapes, the signature has the numbers of elements, because only these
    have to agree: a scalar may meet a tensor of one element."""
    shapes, sizes, dtype = "", "", ""
    if tensors is not None:
        each = [tensors] if hasattr(tensors, "dtype") else list(tensors)
        dtype = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in each}))
        if operation.sized:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in each)
            sizes = ", ".join(str(math.prod(tensor.shape)) for tensor in each)
    root_text = "" if root is None else str(root)
    signature = digest64(SEPARATOR.join([operation.name, dtype, root_text, sizes]))
    return signature, SEPARATOR.join([operation.name, dtype, root_text, module, shapes])


_MAX_LISTED = 16


def list_key(frame: FrameType, root: int | None, tensors: Any) -> tuple[Any, ...] | None:
    """Identifies a call with a list of tensors or without tensors, for caches. It is short for tensors of one shape and
    dtype, of which an all_gather has as many as there are ranks. None if it would be too long to be kept."""
    each = [] if tensors is None else [(tensor.shape, tensor.dtype) for tensor in tensors]
    kinds = each[:1] if len(set(each)) < 2 else each
    return None if len(kinds) > _MAX_LISTED else (id(frame.f_code), frame.f_lasti, root, None, len(each), *kinds)


MAX_DEPTH = 80
"""The maximum number of frames that are searched for the call site. FSDP's hooks are some thirty frames deep."""
_SKIPPED_FILES = ("/contextlib.py", "/functools.py", "/threading.py")
_MAX_FILE_CHARS = 150
_MODULE_DEPTH = 8
_PARAM_GROUP = "/_fsdp_param_group.py"


class CallSites:
    """Finds call sites: the number of each one's text in the call rings, and a digest of file name, line and function.

    For speed, call sites are cached by code object and instruction."""

    def __init__(self, rings: CallRings, torch_file: str) -> None:
        self._rings = rings
        package = Path(__file__).parents[2]
        self._inner = (f"{Path(torch_file).parent}/", f"{package}/watch/", f"{package}/base/", "<frozen ")
        self._files: dict[str, bool] = {}
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._codes: dict[int, CodeType] = {}
        """Keeps code objects alive, so that their ids stay unique."""

    def find(self, frame: FrameType) -> tuple[int, int]:
        """The text number and digest of the site that issued a call from `frame`."""
        first, files = frame, self._files
        found: FrameType | None = frame
        for _ in range(MAX_DEPTH):
            if found is None:
                break
            name = found.f_code.co_filename
            inner = files.get(name)
            if not (self._is_inner(name) if inner is None else inner):
                known = self._known.get((id(found.f_code), found.f_lasti))
                return known if known is not None and self._rings.fresh(known[0]) else self._add(found)
            found = found.f_back
        return self._format(first)  # a thread of torch, or more than MAX_DEPTH frames

    def module(self, frame: FrameType | None) -> str:
        """The module for which FSDP2 gathers or reduces parameters, if a nearby frame is one of FSDP2; else empty."""
        for _ in range(_MODULE_DEPTH):
            if frame is None:
                break
            if frame.f_code.co_filename.endswith(_PARAM_GROUP):
                name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
                if name:
                    return str(name)
            frame = frame.f_back
        return ""

    def is_site(self, frame: FrameType) -> bool:
        """Whether `frame` itself is the call site, which its code and instruction then identify."""
        return not self._files.get(frame.f_code.co_filename, True)

    def _is_inner(self, filename: str) -> bool:
        inner = filename.startswith(self._inner) or filename.endswith(_SKIPPED_FILES)
        self._files[filename] = inner
        return inner

    def _add(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        if len(self._codes) > 4096:  # the program keeps compiling new code
            self._known.clear()
            self._codes.clear()
            for clear_cache in self._rings.on_turnover:  # of call keys, which refer to code objects as well
                clear_cache()
        self._codes[id(code)] = code
        site = self._known[id(code), frame.f_lasti] = self._format(frame)
        return site

    def _format(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        name: Any = getattr(code, "co_qualname", code.co_name)  # with the class since Python 3.11
        text = f"{code.co_filename[-_MAX_FILE_CHARS:]}:{frame.f_lineno} in {name}"
        return self._rings.text(text), digest64(text.rsplit("/", 1)[-1])
