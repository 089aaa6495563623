"""Makes the wrapper of a collective, which runs before and after every call: docs/recorder.md says what it costs.

The wrapper is compiled from a text for each function, with the function's own parameters. Passing on `*args, **kwargs`
and looking for the group and the tensor in them would cost as much as writing the record.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from keyword import iskeyword
from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple

from lockstep.base.errors import CollectiveRefused
from lockstep.watch.beacon.beacon_records import CALL_ENTRY_STRUCT, CALL_WORDS, CALLS_PER_RING, FLAG_ASYNC, LEFT_WORD
from lockstep.watch.recorder.operations import ArgumentPositions, find_rank, get_argument, list_key

_FIRST_LINE = sys._getframe().f_lineno + 1
_SOURCE = """
def {function}({parameters}):
    if _inside and _get_ident() in _inside:
        return _original({arguments})
    _at, _member, _tensor, _nested = -1, None, {tensor}, False
    try:
        try:
            _member = _members[{group}]
        except (KeyError, TypeError):
            _member = _owner.member({group})
        if _member is not None and not (_coalesced and _member.group in _coalesced):
            _frame, _root = _getframe(1), {root}
            try:
                _cache_key = _id(_frame.f_code), _frame.f_lasti, _root, _tensor.shape, _tensor.dtype
            except AttributeError:  # no tensor, or a list of tensors
                _cache_key = _list_key(_frame, _root, _tensor)
            _key = _call_keys.get(_cache_key) or _look_up(_operation, _tensor, _root, _frame, _call_keys, _cache_key)
            _nested = {nested}
            if _nested:
                _member.next_query = 0
            # CommunicatorMember.enter, inlined
            _member.issued = _issued = _member.issued + 1
            _seq = _issued + _member.lead if _issued < _member.next_query else _member.query_sequence(_issued)
            _slot, _stage = _member.slot, _rings.packed_stage
            _calls = _slot.calls
            _begin = _slot.ring + _calls % {CALLS_PER_RING} * {CALL_WORDS}
            _slot.calls = _calls = _calls + 1
            _pack_into(
                _memory, _begin << 3, _calls, _seq, _issued, _monotonic_ns(), _key[0], _key[1],
                _rings.pack_stage() if _stage is None else _stage, _calls,
            )
            _words[_slot.calls_word] = _calls
            _at = _begin + {LEFT_WORD}
            _order_check = _member.order_check
            if _order_check is not None:
                _other = _order_check.enter(_issued, _key[2])
                if _other is not None:
                    _member.refuse(_other, _at)
    except _CollectiveRefused:
        raise
    except Exception as _error:  # an internal error must not stop the job
        _owner.record_failure(_error)
    if _at < 0:
        return _original({arguments})
    if _nested:
        _inside.add(_get_ident())
    try:
        _result = _original({arguments})
    except Exception as _error:
        _raise_translated(_owner, _member, _at, _error)
        raise
    finally:
        if _nested:
            _inside.discard(_get_ident())
    try:
        if _result is None and (_member.blocking_devices is None or _member.has_returned(_tensor)):
            _words[_at] = _monotonic_ns()
        else:
            _member.slot.leave(_at, {FLAG_ASYNC})
        if _nested:
            _member.resynchronize()
    except Exception as _error:
        _owner.record_failure(_error)
    return _result
"""
"""The names of the wrapper begin with an underscore, because those of the parameters do not."""


class _Spelling(NamedTuple):
    """The expressions in the text of a wrapper that depend on the function."""

    parameters: str
    arguments: str
    group: str
    tensor: str
    root: str


_FORWARDING_MODULES = ("torch.distributed.c10d_logger", "typing_extensions", "warnings")
"""Where decorators are from that pass all arguments on as they are."""


def compile_wrapper(
    original: Callable[..., Any], positions: ArgumentPositions, names: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles the wrapper of a function of torch. `names` are the other names in its text, without underscore."""
    spelling, defaults = _spell(original, positions)
    constants = {
        "CALLS_PER_RING": CALLS_PER_RING, "CALL_WORDS": CALL_WORDS, "LEFT_WORD": LEFT_WORD, "FLAG_ASYNC": FLAG_ASYNC,
    }  # fmt: skip
    name = original.__name__
    if not name.isidentifier() or iskeyword(name):  # another library has replaced torch's function by a lambda
        name = "collective"
    nested = (
        "_nests or _type(_tensor) is not _Tensor and _has_override(_tensor)" if _calls_overrides(original) else "_nests"
    )
    text = _SOURCE.format(function=name, nested=nested, **spelling._asdict(), **constants)
    used = {
        "original": original, "positions": positions, "get_ident": get_ident, "monotonic_ns": monotonic_ns, "id": id,
        "type": type,
        "getframe": sys._getframe, "list_key": list_key, "find_rank": find_rank, "get_argument": get_argument,
        "pack_into": CALL_ENTRY_STRUCT.pack_into, "CollectiveRefused": CollectiveRefused, **names,
    }  # fmt: skip
    namespace = {f"_{name}": value for name, value in used.items()} | defaults
    # A traceback shows the lines of this file.
    exec(compile("\n" * (_FIRST_LINE - 1) + text, __file__, "exec"), namespace)
    wrapper: Callable[..., Any] = namespace[name]
    return wrapper


def _calls_overrides(original: Callable[..., Any]) -> bool:
    """Whether a function hands tensors of a subclass to the subclass, which usually calls the function again, with its
    name in torch: that of the wrapper."""
    return "handle_torch_function" in getattr(getattr(inspect.unwrap(original), "__code__", None), "co_names", ())


def _spell(original: Callable[..., Any], positions: ArgumentPositions) -> tuple[_Spelling, dict[str, Any]]:
    """The expressions, and the values of the names of default arguments in them."""
    parameters = list(inspect.signature(original).parameters.values())
    if not _passes_arguments_on(original) or not all(_is_plain(each) for each in parameters):
        return _spell_generally(positions), {}
    names = [each.name for each in parameters]
    defaults = {f"_default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    shown = [f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in names]
    group, tensor = (name if name in names else "None" for _, name in (positions.group, positions.tensor))
    given = ", ".join(name for _, name in positions.root)
    root = f"_find_rank(({given},), _member.ranks) or 0" if given else "None"
    return _Spelling(", ".join(shown), ", ".join(names), group, tensor, root), defaults


def _spell_generally(positions: ArgumentPositions) -> _Spelling:
    """For a function whose parameters are not certain."""
    group, tensor = (f"_get_argument({position}, args, kwargs)" for position in (positions.group, positions.tensor))
    given = ", ".join(f"_get_argument({position}, args, kwargs)" for position in positions.root)
    root = f"_find_rank(({given},), _member.ranks) or 0" if given else "None"
    return _Spelling("*args, **kwargs", "*args, **kwargs", group, tensor, root)


def _is_plain(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and not parameter.name.startswith("_")


def _passes_arguments_on(function: Callable[..., Any]) -> bool:
    """Whether a call reaches the innermost function as it is, so that its parameters are the function's own."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if getattr(function, "__globals__", {}).get("__name__") not in _FORWARDING_MODULES:
            return False
        function = inner
    return inspect.isfunction(function)
