"""The recorded arguments of calls, and c10d's counts."""

import json
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.beacon.beacon_records import SEPARATOR
from lockstep.watch.recorder import import_hook, operations
from lockstep.watch.recorder.c10d_status import FlightRecorder
from lockstep.watch.recorder.communicator import SequenceOffsets
from lockstep.watch.recorder.operations import (
    FUNCTIONAL_OPERATIONS,
    OPERATIONS,
    ArgumentPositions,
    describe_call,
    get_rank_argument,
)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if hasattr(dist.distributed_c10d, name)])
def test_the_arguments_of_every_function_of_this_torch_are_found(name):
    operation, positions = OPERATIONS[name], ArgumentPositions(getattr(dist.distributed_c10d, name), OPERATIONS[name])
    assert bool(positions.tensor[1]) == bool(operation.tensor)
    assert bool(positions.root) == bool(operation.root) and bool(positions.peer) == bool(operation.peer)
    assert positions.group[1] or name == "batch_isend_irecv"


def test_every_function_of_this_torch_is_listed():
    public = {name for name in dist.distributed_c10d.__all__ if callable(getattr(dist, name, None))}
    others = {
        name for name in public if name[0].isupper() or name.startswith(("get_", "is_", "new_", "init_", "destroy_"))
    }
    others |= {"group", "supports_complex", "split_group", "shrink_group", "record_comm", "reduce_op"}
    assert public - others == set(OPERATIONS) - {"_all_gather_base", "_reduce_scatter_base"}


def test_every_functional_collective_of_this_torch_is_listed():
    from torch.distributed import _functional_collectives as funcol

    with_group = {
        name for name, value in vars(funcol).items()
        if isinstance(value, types.FunctionType) and value.__module__ == funcol.__name__
        and "group" in ArgumentPositions.__init__.__globals__["inspect"].signature(value).parameters
        and not name.startswith("_") and not name.endswith("_inplace")
    }  # fmt: skip
    assert with_group - {"permute_tensor"} <= set(FUNCTIONAL_OPERATIONS)


def test_a_signature_depends_on_operation_shapes_dtype_and_root():
    operation, four = OPERATIONS["broadcast"], torch.ones(4)
    signature, text = describe_call(operation, four, 1, "layers.3")
    assert text.split(SEPARATOR) == ["broadcast", "float32", "1", "layers.3", "[4]"]
    assert describe_call(operation, torch.zeros(4), 1)[0] == signature
    for other in (
        describe_call(OPERATIONS["reduce"], four, 1), describe_call(operation, torch.ones(5), 1),
        describe_call(operation, four.double(), 1), describe_call(operation, four, 0),
    ):  # fmt: skip
        assert other[0] != signature
    assert (
        describe_call(OPERATIONS["all_to_all"], [four, four], None)[0]
        == describe_call(OPERATIONS["all_to_all"], [torch.ones(9)], None)[0]
    )
    several = describe_call(OPERATIONS["all_reduce_coalesced"], [four, torch.ones(2, 2).double()], None)[1]
    assert several.split(SEPARATOR)[1:] == ["float32, float64", "", "", "[4], [2, 2]"]


def test_signatures_are_the_same_in_every_process():
    program = "from lockstep.watch.beacon.beacon_records import digest64; print(digest64('all_reduce'))"
    outputs = {subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) for _ in range(2)}
    assert outputs == {f"{operations.digest64('all_reduce')}\n"}


def test_roots_are_ranks_of_the_communicator():
    positions = ArgumentPositions(dist.broadcast, OPERATIONS["broadcast"])
    assert get_rank_argument(positions.root, (None, 6), {}, [4, 6]) == 1
    assert get_rank_argument(positions.root, (None,), {"group_src": 1}, [4, 6]) == 1
    assert get_rank_argument(positions.root, (None,), {}, [4, 6]) is None
    assert get_rank_argument(positions.root, (None, 9), {}, [4, 6]) is None


@given(st.lists(st.tuples(st.sampled_from(["collective", "message"]), st.integers(0, 3)), max_size=700))
def test_offsets_count_collectives_only(steps):
    """Compared with a plain count: a collective increases the number by one, a message by any amount."""
    offsets, number, expected, collectives_seen = SequenceOffsets(), 0, {}, 0
    for kind, increase in steps:
        if kind == "collective":
            number += 1
            collectives_seen += 1
            expected[number] = collectives_seen
        else:
            number += increase
            offsets.skip(number, increase)
    assert number - offsets.total == collectives_seen
    for raw, seen in list(expected.items())[-100:]:
        assert offsets.to_collective(raw) == seen


def test_status_and_names_of_a_flight_recorder():
    dumps = []

    def dump(includeCollectives):  # noqa: N803
        dumps.append(includeCollectives)
        status = {"0": {"last_enqueued_collective": "7", "last_completed_collective": "-1"}}
        entries = [{"pg_id": 0, "process_group": ["12", "fsdp"]}] if includeCollectives else []
        return json.dumps({"pg_status": status, "entries": entries})

    flight = FlightRecorder("gloo", dump)
    assert flight.status() == {"0": (7, -1, -1)}
    assert (flight.name("0"), flight.name("0")) == ("12", "12")
    assert flight.name("5") is None and flight.name("5") is None
    assert dumps == [False, True, True]  # an unknown number is not looked up again immediately


def test_a_hook_is_called_when_a_module_has_been_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "to_be_hooked.py").write_text("VALUE = 1\n")
    seen = []
    import_hook.when_imported("to_be_hooked", lambda module: seen.append(module.VALUE))
    assert seen == []
    import to_be_hooked

    assert seen == [1] and to_be_hooked.__spec__.loader.__class__.__name__ == "SourceFileLoader"
    import_hook.when_imported("to_be_hooked", lambda module: seen.append(2))
    assert seen == [1, 2]
    import_hook.when_imported("never_there", lambda module: seen.append(3))
    with pytest.raises(ModuleNotFoundError):
        import never_there  # noqa: F401
    import_hook.cancel_import_hook("never_there")
