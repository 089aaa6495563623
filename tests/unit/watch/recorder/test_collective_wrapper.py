"""The wrapper of a collective is compiled for the parameters of each function, and passes calls on as they are."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.overrides import handle_torch_function, has_torch_function

from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.recorder import collective_wrapper
from lockstep.watch.recorder.communicator import CommunicatorMember
from lockstep.watch.recorder.operations import OPERATIONS, ArgumentPositions, CallSites
from lockstep.watch.recorder.wrappers import CollectiveWrappers

COLLECTIVES = sorted(
    name for name, operation in OPERATIONS.items()
    if inspect.isfunction(getattr(distributed_c10d, name, None)) and not (operation.p2p or operation.uncounted)
)  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectiveWrappers]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    rings = open_beacon("run-1", "policy-0", "policy", 0).call_rings()
    assert rings is not None
    slot = rings.open_slot(77, 2, "0", "", "gloo", 2, 0)
    assert slot is not None
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: slot.calls)
    member = CommunicatorMember(group, slot, "0", "0", [4, 5], 0)

    def record_failure(error: Exception) -> None:
        raise error

    owner: Any = SimpleNamespace(
        rings=rings, sites=CallSites(rings, torch.__file__), member_cache={None: member, "g": member},
        member=lambda group: member, record_failure=record_failure, translate=lambda error: error,
    )  # fmt: skip
    yield CollectiveWrappers(owner, torch)
    close_beacon()


def calls() -> list[tuple[str, str, int | None]]:
    return [(call.operation, call.shapes, call.root) for call in read_calls(current_beacon().path, 0)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrapper_has_the_parameters_of_its_function(name: str, made: CollectiveWrappers) -> None:
    original = getattr(distributed_c10d, name)
    wrapper = made.wrapper_of(original, OPERATIONS[name])
    assert (
        inspect.signature(wrapper, follow_wrapped=False)
        .replace(return_annotation=inspect.Signature.empty)
        .parameters.keys()
        == inspect.signature(original).parameters.keys()
    )
    for parameter in inspect.signature(wrapper, follow_wrapped=False).parameters.values():
        assert parameter.default is inspect.signature(original).parameters[parameter.name].default
    assert (wrapper.__name__, wrapper.__doc__) == (original.__name__, original.__doc__)


def broadcast(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Any:
    return tensor, src, group, async_op, group_src


def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that accepts an old name of a parameter."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "old_src" in kwargs:
            kwargs["src"] = kwargs.pop("old_src")
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("function", [broadcast, renaming(broadcast)], ids=["plain", "decorated"])
def test_calls_are_passed_on_and_recorded(function: Callable[..., Any], made: CollectiveWrappers) -> None:
    wrapper, one = made.wrapper_of(function, OPERATIONS["broadcast"]), torch.ones(3)
    assert wrapper(one, 5) == (one, 5, None, False, None)
    assert wrapper(one, group_src=1, group="g") == (one, None, "g", False, 1)
    assert wrapper(tensor=one, src=4, async_op=True) == (one, 4, None, True, None)
    assert calls() == [("broadcast", "[3]", 1), ("broadcast", "[3]", 1), ("broadcast", "[3]", 0)]


def test_a_decorator_may_accept_other_arguments(made: CollectiveWrappers) -> None:
    wrapper = made.wrapper_of(renaming(broadcast), OPERATIONS["broadcast"])
    one = torch.ones(1)
    assert wrapper(one, old_src=5)[:2] == (one, 5)


def test_a_function_may_have_been_replaced_by_a_lambda(made: CollectiveWrappers) -> None:
    wrapper = made.wrapper_of(lambda tensor, group=None: (tensor, group), OPERATIONS["all_reduce"])
    one = torch.ones(1)
    assert wrapper(one) == (one, None) and wrapper.__name__ == "<lambda>"


def test_call_sites_are_not_mistaken_for_others_when_their_code_is_freed(made: CollectiveWrappers) -> None:
    """Caches know code by its id, which later code may get once the code is no longer kept."""
    wrapper, one = made.wrapper_of(broadcast, OPERATIONS["broadcast"]), torch.ones(1)
    wrapper(one, 4)
    sites = made._owner.sites
    sites._codes |= {-number: broadcast.__code__ for number in range(1, 5000)}
    wrapper(one, 4)
    (keys,) = made._call_keys
    assert len(keys) == 1 and len(sites._codes) == 1


def test_the_parts_of_a_coalesced_collective_are_not_recorded(
    made: CollectiveWrappers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would all have the number of that collective."""
    wrapper, one, member = made.wrapper_of(broadcast, OPERATIONS["broadcast"]), torch.ones(1), made._owner.member(None)
    assert member is not None
    member.group = object()
    monkeypatch.setitem(distributed_c10d._world.pg_coalesce_state, member.group, [])
    assert wrapper(one, 5)[:2] == (one, 5) and calls() == []
    monkeypatch.setitem(distributed_c10d._world.pg_coalesce_state, object(), [])
    monkeypatch.delitem(distributed_c10d._world.pg_coalesce_state, member.group)
    assert wrapper(one, 5)[:2] == (one, 5) and calls() == [("broadcast", "[1]", 1)]


class Subclass(torch.Tensor):
    """A tensor whose functions torch calls by `__torch_function__`."""


@pytest.mark.parametrize(
    ("tensor", "parts"), [(torch.ones(2), 1), (torch.nn.Parameter(torch.ones(2)), 1), (Subclass(torch.ones(2)), 2)]
)
def test_a_call_with_a_subclass_is_recorded_once(made: CollectiveWrappers, tensor: torch.Tensor, parts: int) -> None:
    """Torch 2.13 and newer hands it to the subclass, which calls the function again."""
    called = []

    def all_reduce(tensor: Any, group: Any = None) -> None:
        called.append(type(tensor))
        if has_torch_function((tensor,)):
            handle_torch_function(wrapper, (tensor,), tensor, group=group)

    wrapper = made.wrapper_of(all_reduce, OPERATIONS["all_reduce"])
    for _ in range(2):
        wrapper(tensor)
    assert called == [type(tensor)] * 2 * parts
    assert calls() == [("all_reduce", "[2]", None)] * 2


def test_a_wrong_call_fails_like_the_function(made: CollectiveWrappers) -> None:
    wrapper = made.wrapper_of(broadcast, OPERATIONS["broadcast"])
    with pytest.raises(TypeError, match=r"broadcast\(\) missing 1 required positional argument: 'tensor'"):
        wrapper()
    assert calls() == []


def test_a_traceback_shows_the_line_of_the_wrapper(made: CollectiveWrappers) -> None:
    def all_reduce(tensor: Any, group: Any = None) -> None:
        raise ValueError("no")

    wrapper = made.wrapper_of(all_reduce, OPERATIONS["all_reduce"])
    with pytest.raises(ValueError, match="no") as raised:
        wrapper(torch.ones(1))
    frame = next(each for each in traceback.extract_tb(raised.tb) if each.filename == collective_wrapper.__file__)
    assert (frame.name, frame.line) == ("all_reduce", "_result = _original({arguments})")
    (call,) = read_calls(current_beacon().path, 0)
    assert call.failed and not call.inside


def test_a_parameter_with_an_underscore_hides_no_name_of_the_wrapper(made: CollectiveWrappers) -> None:
    def barrier(_at: int = 3, group: Any = None) -> int:
        return _at

    assert ArgumentPositions(barrier, OPERATIONS["barrier"]).group == (1, "group")
    wrapper = made.wrapper_of(barrier, OPERATIONS["barrier"])
    assert (wrapper(), wrapper(_at=5), wrapper(6)) == (3, 5, 6)
    assert calls() == [("barrier", "", None)] * 3
