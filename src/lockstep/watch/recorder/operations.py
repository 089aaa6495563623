"""The operations of torch.distributed: which functions communicate, what of their arguments must agree between
members, and which line of the program issued a call.

Torch has renamed several functions and kept the old names. A table by name, with argument positions read from the
signatures of the installed version, fits them all.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lockstep.watch.beacon.call_ring import CallRings
from lockstep.watch.beacon.file_format import SEPARATOR


@dataclass(frozen=True)
class Operation:
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
_GATHER = Operation("all_gather_into_tensor", ("input_tensor", "input"))
_SCATTER = Operation("reduce_scatter_tensor", ("input", "input_tensor"))

OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation("all_reduce", ("tensor",)),
    "all_reduce_coalesced": Operation("all_reduce_coalesced", ("tensors",)),
    "broadcast": Operation("broadcast", ("tensor",), root=_SOURCE),
    "reduce": Operation("reduce", ("tensor",), root=_TARGET),
    "all_gather": Operation("all_gather", ("tensor",)),
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
    "monitored_barrier": Operation("monitored_barrier", unseen=True),
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
"""Of torch.distributed._functional_collectives, which DTensor and tensor parallelism call from Python."""


class ArgumentPositions:
    """Where a function of the installed torch takes what we look at."""

    __slots__ = ("group", "peer", "root", "tensor")

    def __init__(self, function: Callable[..., Any], form: Operation) -> None:
        names = list(inspect.signature(function).parameters)
        self.group = _find_position(names, ("group",))
        self.tensor = _find_position(names, form.tensor)
        self.root = [_find_position(names, (name,)) for name in form.root if name in names]
        self.peer = [_find_position(names, (name,)) for name in form.peer if name in names]


ArgumentPosition = tuple[int, str]
_NO_POSITION: ArgumentPosition = (1 << 30, "")


def _find_position(names: list[str], wanted: tuple[str, ...]) -> ArgumentPosition:
    for name in wanted:
        if name in names:
            return names.index(name), name
    return _NO_POSITION


def get_argument(place: ArgumentPosition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a place, None when it was not given."""
    at, name = place
    return args[at] if at < len(args) else kwargs.get(name)


def get_rank_argument(
    places: Sequence[ArgumentPosition], args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
) -> int | None:
    """The root or peer as a rank of the communicator whose global ranks are `ranks`; None when it was not given."""
    for number, place in enumerate(places):
        rank = get_argument(place, args, kwargs)
        if rank is not None:
            if number == 0 and ranks:
                return ranks.index(rank) if rank in ranks else None
            return int(rank)
    return None


def describe_call(form: Operation, tensors: Any, root: int | None, module: str = "") -> tuple[int, str]:
    """64-bit signature and text of a call. `tensors` is a tensor, a list of them, or None; the module is told, and no
    part of the signature."""
    shapes, dtype = "", ""
    if tensors is not None:
        each = [tensors] if hasattr(tensors, "dtype") else list(tensors)
        dtype = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in each}))
        shapes = ", ".join(str(list(tensor.shape)) for tensor in each) if form.sized else ""
    root_text = "" if root is None else str(root)
    signature = digest64(SEPARATOR.join([form.operation, dtype, root_text, shapes]))
    return signature, SEPARATOR.join([form.operation, dtype, root_text, module, shapes])


def digest64(text: str) -> int:
    """64 bits of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


MAX_DEPTH = 80
"""Frames that are looked at: FSDP's hooks stand some thirty frames below the line that called the model."""
_SKIPPED_FILES = ("/contextlib.py", "/functools.py", "/threading.py")
_MAX_FILE_CHARS = 150
_MODULE_DEPTH = 8
_PARAM_GROUP = "/_fsdp_param_group.py"


class CallSites:
    """Call sites by number of their text in the tape, and a digest of file name, line and function.

    Cheap where it is called often: a place is known by its code object and instruction, and formatted once."""

    def __init__(self, tape: CallRings, torch_file: str) -> None:
        self._tape = tape
        package = Path(__file__).parents[2]
        self._inner = (f"{Path(torch_file).parent}/", f"{package}/watch/", f"{package}/base/", "<frozen ")
        self._files: dict[str, bool] = {}
        self._known: dict[tuple[int, int], tuple[int, int]] = {}
        self._codes: dict[int, CodeType] = {}
        """Keeps the code objects, so that an id means one of them for good."""

    def find(self, frame: FrameType) -> tuple[int, int]:
        """Number of the text and digest of the place that issued a call from `frame`."""
        first, files = frame, self._files
        found: FrameType | None = frame
        for _ in range(MAX_DEPTH):
            if found is None:
                break
            name = found.f_code.co_filename
            inner = files.get(name)
            if not (self._judge(name) if inner is None else inner):
                known = self._known.get((id(found.f_code), found.f_lasti))
                return known if known is not None and self._tape.fresh(known[0]) else self._note(found)
            found = found.f_back
        return self._said(first)  # a thread of torch's own, or too deep

    def module(self, frame: FrameType | None) -> str:
        """The module that FSDP2 gathers or reduces for, where one of its frames is near; else empty."""
        for _ in range(_MODULE_DEPTH):
            if frame is None:
                break
            if frame.f_code.co_filename.endswith(_PARAM_GROUP):
                name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
                if name:
                    return str(name)
            frame = frame.f_back
        return ""

    def keep(self, frame: FrameType) -> bool:
        """Whether `frame` itself is the place, so that its code and instruction stand for it from now on."""
        return not self._files.get(frame.f_code.co_filename, True)

    def _judge(self, filename: str) -> bool:
        inner = filename.startswith(self._inner) or filename.endswith(_SKIPPED_FILES)
        self._files[filename] = inner
        return inner

    def _note(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        if len(self._codes) > 4096:  # code that is made anew again and again
            self._known.clear()
            self._codes.clear()
        self._codes[id(code)] = code
        said = self._known[id(code), frame.f_lasti] = self._said(frame)
        return said

    def _said(self, frame: FrameType) -> tuple[int, int]:
        code = frame.f_code
        name: Any = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on with the class
        text = f"{code.co_filename[-_MAX_FILE_CHARS:]}:{frame.f_lineno} in {name}"
        return self._tape.text(text), digest64(text.rsplit("/", 1)[-1])
