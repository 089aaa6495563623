"""Wraps the functions of torch.distributed that communicate, under all their names.

If one of these functions calls another (object collectives, batches), only the outer call is recorded. A wrapper has
the name, the signature and the documentation of the wrapped function.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any, Protocol

from lockstep.base.errors import CollectiveRefused
from lockstep.watch.beacon.beacon_records import FLAG_ASYNC, FLAG_FAILED
from lockstep.watch.beacon.call_ring import CallRings, pack_text_numbers
from lockstep.watch.recorder.collective_wrapper import compile_wrapper
from lockstep.watch.recorder.communicator import CallKey, CommunicatorMember
from lockstep.watch.recorder.operations import (
    FUNCTIONAL_OPERATIONS,
    OPERATIONS,
    ArgumentPositions,
    CallSites,
    Operation,
    describe_call,
    get_argument,
    get_rank_argument,
)
from lockstep.watch.recorder.torch_fit import missing_parameters
from lockstep.watch.recorder.transfers import (
    Message,
    Transfer,
    TransferTracker,
    transfer_of,
    transfers_by_handle,
    waited_handles,
)

_MAX_CACHED = 4096
C10D_MODULE = "torch.distributed.distributed_c10d"
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"


class WrapperOwner(Protocol):
    """The part of the recorder that the wrappers use."""

    rings: CallRings
    sites: CallSites
    member_cache: dict[Any, CommunicatorMember | None]
    """Memberships by the values that callers pass as `group`."""

    def member(self, group: Any) -> CommunicatorMember | None: ...
    def record_failure(self, error: Exception) -> None: ...
    def translate(self, error: Exception) -> Exception: ...


recording_threads: set[int] = set()
"""Threads inside a recorded call that may consist of others; their further calls are part of that call."""


def in_recorded_call() -> bool:
    """Whether this thread is inside a recorded call that may consist of others; it translates their errors."""
    return get_ident() in recording_threads


_UNRECORDED_WAIT = contextlib.nullcontext()


def wrap_wait(original: Callable[..., Any], translate: Callable[[Exception], Exception]) -> Callable[..., Any]:
    """The wrapper of `Work.wait`, which also every collective of a backend that blocks the host calls. It records that
    the process waits for a message, and raises the verdict that explains an error."""

    @functools.wraps(original)
    def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if recording_threads or transfers_by_handle:
                with _recorded_wait(handle):
                    return original(handle, *args, **kwargs)
            return original(handle, *args, **kwargs) if args or kwargs else original(handle)
        except Exception as error:
            translated = error if in_recorded_call() else translate(error)
            if translated is error:
                raise
            raise translated from error

    return wait


def _recorded_wait(handle: Any) -> contextlib.AbstractContextManager[None]:
    """Around a `wait()` while there are unfinished messages, or a call is recorded that may consist of others."""
    if in_recorded_call():
        waited_handles[get_ident()] = handle
    found = transfer_of(handle)
    return _UNRECORDED_WAIT if found is None else _inside_transfer(*found)


@contextlib.contextmanager
def _inside_transfer(tracker: TransferTracker, transfer: Transfer) -> Iterator[None]:
    transfer.inside(1)
    try:
        yield
    finally:
        transfer.inside(-1)
        tracker.poll()


class CollectiveWrappers:
    """Wraps functions and restores the originals."""

    def __init__(self, owner: WrapperOwner, torch: Any) -> None:
        self._owner, self._torch = owner, torch
        self._wrapped: dict[int, tuple[Any, Any]] = {}
        """The original function and its wrapper, by the id of the original."""
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        self._texts: dict[Any, tuple[int, str]] = {}
        self._call_keys: list[dict[Any, CallKey]] = []
        """The cache of call keys of each wrapper."""
        self._coalesced = getattr(torch.distributed.distributed_c10d._world, "pg_coalesce_state", {})
        """The process groups with a coalescing manager. Calls on them are no collectives, but parts of one, which the
        manager issues at its end and c10d counts like a call from C++."""
        owner.rings.on_turnover.append(self._clear_call_keys)

    def _clear_call_keys(self) -> None:
        for each in self._call_keys:
            each.clear()

    def patch(self, module: ModuleType) -> None:
        """Wraps the functions of torch.distributed or of its functional collectives."""
        for name, operation in (FUNCTIONAL_OPERATIONS if module.__name__ == FUNCTIONAL_MODULE else OPERATIONS).items():
            original = module.__dict__.get(name)
            if not inspect.isfunction(original) or missing_parameters(original, operation):
                continue
            if not hasattr(original, "__lockstep__"):
                self.replace(module, name, original, self.wrapper_of(original, operation))

    def replace(self, module: ModuleType, name: str, original: Any, wrapper: Any) -> None:
        """Replaces a function of a module by its wrapper."""
        wrapper.__lockstep__ = True
        self._wrapped[id(original)] = original, wrapper
        self._replaced.append((module, name, original))
        setattr(module, name, wrapper)

    def patch_copies(self) -> None:
        """Wraps the functions under the names that other modules have imported from torch.distributed already.

        These are the functions' own names, except in torch's functional collectives. Reading every value of every
        module instead would change their reference counts, and a forked worker would copy most of the pages that it
        shares with its fork server.
        """
        own = {original.__name__ for original, _ in self._wrapped.values()}
        for module in list(sys.modules.values()):
            known = getattr(module, "__dict__", None)
            if not isinstance(module, ModuleType) or not known:
                continue
            for name in list(known) if module.__name__ == FUNCTIONAL_MODULE else own & known.keys():
                pair = self._wrapped.get(id(known[name]))
                if pair is not None and pair[0] is known[name]:
                    self._replaced.append((module, name, pair[0]))
                    setattr(module, name, pair[1])

    def undo(self) -> None:
        """Restores all original functions."""
        for module, name, original in reversed(self._replaced):
            setattr(module, name, original)
        self._replaced.clear()
        self._wrapped.clear()

    def patch_functional(self, module: ModuleType) -> None:
        """Wraps functional collectives, and adds the wrappers to the compiler's table of equivalent functions."""
        remaps = getattr(module, "traceable_collective_remaps", {})
        for original, wrapper in list(self._wrapped.values()):
            if original in remaps:
                remaps[wrapper] = remaps[original]
        self.patch(module)

    def wrapper_of(self, original: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
        """The wrapper of a function of torch."""
        if operation.p2p or operation.uncounted:
            return self._uncounted(original, operation)
        if original.__module__ == FUNCTIONAL_MODULE:
            return self._traced(original, self._collective(original, operation))
        return self._collective(original, operation)

    def _traced(self, original: Callable[..., Any], recording: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper that calls the original while the compiler traces functional collectives."""
        torch = self._torch

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return recording(*args, **kwargs)

        return wrapper

    def _collective(self, original: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
        """The wrapper of a collective."""
        owner, rings = self._owner, self._owner.rings
        call_keys: dict[Any, CallKey] = {}
        self._call_keys.append(call_keys)
        names = {
            "owner": owner, "members": owner.member_cache, "rings": rings, "words": rings.words,
            "memory": rings.memory, "inside": recording_threads, "call_keys": call_keys, "look_up": self._look_up,
            "operation": operation, "nests": _calls_others(original), "raise_translated": _raise_translated,
            "Tensor": self._torch.Tensor, "has_override": self._has_override, "coalesced": self._coalesced,
        }  # fmt: skip
        wrapper = compile_wrapper(original, ArgumentPositions(original, operation), names)
        return functools.wraps(original)(wrapper)

    def _has_override(self, tensors: Any) -> bool:
        """Whether a tensor, or one of a list, is of a subclass with a `__torch_function__`."""
        each = tensors if isinstance(tensors, list | tuple) else (tensors,)
        return bool(self._torch.overrides.has_torch_function(each))

    def _describe(self, operation: Operation, tensors: Any, root: int | None, module: str) -> tuple[int, str]:
        if not hasattr(tensors, "dtype"):
            return describe_call(operation, tensors, root, module)
        key = operation.name, tensors.shape, tensors.dtype, root, module
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) >= _MAX_CACHED:
                self._texts.clear()
            known = self._texts[key] = describe_call(operation, tensors, root, module)
        return known

    def _look_up(
        self,
        operation: Operation,
        tensors: Any,
        root: int | None,
        frame: FrameType,
        call_keys: dict[Any, CallKey],
        cache_key: Any,
    ) -> CallKey:
        """The key of a call. Caches it under `cache_key`, unless this is None or does not identify the call."""
        owner = self._owner
        site, site_digest = owner.sites.find(frame)
        is_site = owner.sites.is_site(frame)
        signature, text = self._describe(operation, tensors, root, "" if is_site else owner.sites.module(frame))
        label = owner.rings.text(text)
        key = signature, pack_text_numbers(label, site), signature ^ site_digest
        if is_site and cache_key is not None:
            if len(call_keys) >= _MAX_CACHED:
                call_keys.clear()
            call_keys[cache_key] = key
        return key

    def _uncounted(self, original: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
        """The wrapper of a point-to-point call or of a collective that c10d does not count. It records the call and
        subtracts it from c10d's sequence number."""
        owner = self._owner
        positions = ArgumentPositions(original, operation)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if in_recorded_call():
                return original(*args, **kwargs)
            with _recorded(owner, self._look_up, operation, positions, args, kwargs, sys._getframe(1)) as leave:
                result = original(*args, **kwargs)
                leave(result)
                return result

        return wrapper


@contextlib.contextmanager
def _recorded(
    owner: WrapperOwner,
    look_up: Callable[..., CallKey],
    operation: Operation,
    positions: ArgumentPositions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType,
) -> Iterator[Callable[[Any], None]]:
    member, at, before, transfer, handles = None, -1, 0, None, []
    try:
        member = owner.member(_group_of(operation, positions, args, kwargs))
        if member is not None:
            before = member.sequence()
            member.offsets.begin(before)
            key = look_up(operation, get_argument(positions.tensor, args, kwargs), None, frame, {}, None)
            if operation.p2p:
                at, transfer = member.enter_p2p(key, _messages(operation, positions, args, kwargs, member))
            else:
                at = member.enter(key)
    except CollectiveRefused:
        if member is not None:
            member.offsets.skip(before, 0)
        raise
    except Exception as error:  # noqa: BLE001 - an internal error must not stop the job
        owner.record_failure(error)
    flag = 0

    def leave(result: Any) -> None:
        nonlocal flag, handles
        returned = result if isinstance(result, list) else [result]
        handles = [each for each in returned if each is not None and not isinstance(each, int)]
        if handles or not (member is None or member.blocks_host):
            flag = FLAG_ASYNC
            handles = handles or [each for each in (waited_handles.get(get_ident()),) if each is not None]

    waited_handles.pop(get_ident(), None)
    recording_threads.add(get_ident())
    try:
        yield leave
    except Exception as error:
        if member is None or at < 0:
            raise
        left, at = at, -1
        _raise_translated(owner, member, left, error)
        raise
    finally:
        recording_threads.discard(get_ident())
        waited_handles.pop(get_ident(), None)
        try:
            if member is not None:
                after = member.sequence()
                member.offsets.skip(after, after - before - (0 if operation.p2p else 1))
                if transfer is not None:
                    member.transfers.returned(transfer, handles)
                if at >= 0:
                    member.slot.leave(at, flag)
        except Exception as error:  # noqa: BLE001
            owner.record_failure(error)


def _group_of(operation: Operation, positions: ArgumentPositions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation.name == "batch_isend_irecv":
        batch = args[0] if args else kwargs["p2p_op_list"]
        return batch[0].group
    return get_argument(positions.group, args, kwargs)


def _messages(
    operation: Operation,
    positions: ArgumentPositions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    member: CommunicatorMember,
) -> list[Message]:
    """The sends and receives of a point-to-point call."""
    if operation.name != "batch_isend_irecv":
        return [Message("send" in operation.name, get_rank_argument(positions.peer, args, kwargs, member.ranks))]
    batch = args[0] if args else kwargs["p2p_op_list"]
    return [Message("send" in each.op.__name__, _peer_in(member, each)) for each in batch]


def _peer_in(member: CommunicatorMember, message: Any) -> int | None:
    """The peer of one of torch's P2POp as a rank in the communicator."""
    peer = getattr(message, "group_peer", None)
    if peer is None and message.peer in member.ranks:
        peer = member.ranks.index(message.peer)
    return peer


def _raise_translated(owner: WrapperOwner, member: CommunicatorMember, left: int, error: Exception) -> None:
    """Records that a call failed, and raises the verdict that explains the failure, if there is one."""
    with contain_errors(owner):
        member.slot.leave(left, FLAG_FAILED)
        member.resynchronize()
    translated = owner.translate(error)
    if translated is not error:
        raise translated from error


def _calls_others(function: Callable[..., Any]) -> bool:
    """Whether a function may call another wrapped function, which is then part of the same call."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = set(code.co_names) if code is not None else set(OPERATIONS)
    return bool(names & (OPERATIONS.keys() | FUNCTIONAL_OPERATIONS.keys()) - {function.__name__})


@contextlib.contextmanager
def contain_errors(owner: WrapperOwner | None) -> Iterator[None]:
    """Contains the recorder's internal errors: they are counted and never reach the job."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        if owner is not None:
            owner.record_failure(error)
