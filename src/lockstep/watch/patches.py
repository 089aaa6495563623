"""Puts the recorder around the functions of torch.distributed that communicate, under all their names.

A function that calls another of them (object collectives, batches) is noted once. The wrappers keep name, signature
and documentation of what they wrap.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, Protocol

from lockstep.watch.collectives import FORMS, FUNCTIONAL, Form, Places, describe, given, rank_given
from lockstep.watch.errors import CollectiveRefused
from lockstep.watch.member import Member
from lockstep.watch.tape import ASYNC, Tape

_CACHED = 4096
_UNKNOWN = (0, -(1 << 62))
"""No signature, and a text that is long gone."""
C10D = "torch.distributed.distributed_c10d"
FUNCOL = "torch.distributed._functional_collectives"


class Owner(Protocol):
    """The recorder, as the wrappers see it."""

    tape: Tape

    def member(self, group: Any) -> Member | None: ...
    def trouble(self, error: Exception) -> None: ...
    def translate(self, error: Exception) -> Exception: ...


class _Thread(threading.local):
    inside = False
    """This thread is in a call that is noted already."""


_thread = _Thread()


def noted() -> bool:
    """Whether this thread is in a call that is noted, and whose errors are translated, already."""
    return _thread.inside


class Wrappers:
    """Makes a wrapper per function and remembers what to put back."""

    def __init__(self, owner: Owner, is_compiling: Callable[[], bool]) -> None:
        self._owner, self._is_compiling = owner, is_compiling
        self._wrapped: dict[int, tuple[Any, Any]] = {}
        """By id of the original: it and its wrapper."""
        self._put: list[tuple[ModuleType, str, Any]] = []

    def patch(self, module: ModuleType) -> None:
        """The functions of torch.distributed or of its functional collectives."""
        for name, form in (FUNCTIONAL if module.__name__ == FUNCOL else FORMS).items():
            original = module.__dict__.get(name)
            if inspect.isfunction(original) and not hasattr(original, "__lockstep__"):
                self.replace(module, name, original, self._wrapper_of(original, form))

    def replace(self, module: ModuleType, name: str, original: Any, wrapper: Any) -> None:
        wrapper.__lockstep__ = True
        self._wrapped[id(original)] = original, wrapper
        self._put.append((module, name, original))
        setattr(module, name, wrapper)

    def patch_copies(self) -> None:
        """Names that other modules took with `from torch.distributed import ...` before we came."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(module, ModuleType) or not names:
                continue
            for name, value in list(names.items()):
                pair = self._wrapped.get(id(value))
                if pair is not None and pair[0] is value:
                    self._put.append((module, name, value))
                    setattr(module, name, pair[1])

    def undo(self) -> None:
        for module, name, original in reversed(self._put):
            setattr(module, name, original)
        self._put.clear()
        self._wrapped.clear()

    def _wrapper_of(self, original: Callable[..., Any], form: Form) -> Callable[..., Any]:
        if form.p2p or form.unseen:
            return self._uncounted(original, form)
        return self._collective(original, form)

    def _collective(self, original: Callable[..., Any], form: Form) -> Callable[..., Any]:
        """The common case, written for speed: about two microseconds."""
        owner, is_compiling, thread, getframe = self._owner, self._is_compiling, _thread, sys._getframe
        places = Places(original, form)
        (group_at, group_name), (tensor_at, tensor_name) = places.group, places.tensor
        roots = places.root
        known: dict[Any, tuple[int, int]] = {}
        fresh = owner.tape.fresh

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or thread.inside:
                return original(*args, **kwargs)
            at, line = -1, None
            try:
                member = owner.member(args[group_at] if len(args) > group_at else kwargs.get(group_name))
                if member is not None:
                    root = rank_given(roots, args, kwargs, member.ranks) or 0 if roots else None
                    tensor = args[tensor_at] if len(args) > tensor_at else kwargs.get(tensor_name)
                    if type(tensor) is list or type(tensor) is tuple:
                        what = _described(owner.tape, form, tensor, root, known, None)
                    else:
                        key = (root, None) if tensor is None else (tensor.shape, tensor.dtype, root)
                        what = known.get(key, _UNKNOWN)
                        if not fresh(what[1]):
                            what = _described(owner.tape, form, tensor, root, known, key)
                    line = member.line
                    at = member.enter(what[0], what[1], getframe(1))
            except CollectiveRefused:
                raise
            except Exception as error:  # noqa: BLE001 - whatever goes wrong in here, the job goes on
                owner.trouble(error)
            if line is None or at < 0:
                return original(*args, **kwargs)
            thread.inside = True
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                _failed(owner, line, at, error)
                told = owner.translate(error)
                if told is error:
                    raise
                raise told from error
            finally:
                thread.inside = False
            try:
                if result is None:
                    line.leave(at)
                else:
                    line.fail(at, ASYNC)
            except Exception as error:  # noqa: BLE001
                owner.trouble(error)
            return result

        return wrapper

    def _uncounted(self, original: Callable[..., Any], form: Form) -> Callable[..., Any]:
        """Point-to-point calls, and collectives that c10d keeps no account of: noted, and taken off its number."""
        owner = self._owner
        places = Places(original, form)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _thread.inside:
                return original(*args, **kwargs)
            with _noted(owner, form, places, args, kwargs, sys._getframe(1)) as leave:
                result = original(*args, **kwargs)
                leave(result)
                return result

        return wrapper


@contextlib.contextmanager
def _noted(
    owner: Owner, form: Form, places: Places, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
) -> Iterator[Callable[[Any], None]]:
    member, at, before = None, -1, 0
    try:
        member = owner.member(_group_of(form, places, args, kwargs))
        if member is not None:
            before = member.sequence()
            tensor = given(places.tensor, args, kwargs) if places.tensor[1] else None
            signature, label = _described(owner.tape, form, tensor, None, {}, None)
            if form.p2p:
                peer = rank_given(places.peer, args, kwargs, member.ranks)
                at = member.pass_message(signature, label, frame, peer)
            else:
                at = member.enter(signature, label, frame)
    except CollectiveRefused:
        raise
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in here, the job goes on
        owner.trouble(error)
    flag = 0

    def leave(result: Any) -> None:
        nonlocal flag
        flag = ASYNC if result is not None and not isinstance(result, int) else 0

    _thread.inside = True
    try:
        yield leave
    except Exception as error:
        if member is not None and at >= 0:
            _failed(owner, member.line, at, error)
            at = -1
        told = owner.translate(error)
        if told is error:
            raise
        raise told from error
    finally:
        _thread.inside = False
        try:
            if member is not None:
                after = member.sequence()
                member.offsets.skip(after, after - before - (0 if form.p2p else 1))
                if at >= 0:
                    member.line.fail(at, flag)
        except Exception as error:  # noqa: BLE001
            owner.trouble(error)


def _group_of(form: Form, places: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if form.operation == "batch_isend_irecv":
        batch = args[0] if args else kwargs["p2p_op_list"]
        return batch[0].group
    return given(places.group, args, kwargs)


def _described(
    tape: Tape, form: Form, tensors: Any, root: int | None, known: dict[Any, tuple[int, int]], key: Any
) -> tuple[int, int]:
    """Signature and number of its text; kept under `key` unless that is None."""
    signature, text = describe(form, tensors, root)
    what = signature, tape.text(text)
    if key is not None:
        if len(known) >= _CACHED:
            known.clear()
        known[key] = what
    return what


def _failed(owner: Owner, line: Any, at: int, error: Exception) -> None:
    try:
        line.fail(at)
    except Exception as trouble:  # noqa: BLE001
        owner.trouble(trouble)


@contextlib.contextmanager
def quiet(owner: Owner | None) -> Iterator[None]:
    """The edge of the recorder: what fails inside is counted and never reaches the job."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        if owner is not None:
            owner.trouble(error)
