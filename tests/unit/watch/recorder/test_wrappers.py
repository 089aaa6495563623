"""Copies of torch.distributed's functions that other modules have imported before a job is recorded."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives, distributed_c10d

from lockstep.base.errors import CollectiveRefused
from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.recorder.collective_order import OrderCheck
from lockstep.watch.recorder.communicator import CommunicatorMember
from lockstep.watch.recorder.operations import OPERATIONS, CallSites, describe_call
from lockstep.watch.recorder.wrappers import CollectiveWrappers


@pytest.fixture
def wrappers() -> Any:
    owner: Any = SimpleNamespace(
        rings=SimpleNamespace(on_turnover=[], words=[], memory=b""), sites=None, member_cache={}
    )
    made = CollectiveWrappers(owner, torch)
    yield made
    made.undo()


def test_copies_are_wrapped_under_their_names_and_restored(
    wrappers: CollectiveWrappers, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = distributed_c10d.all_reduce
    user, other = ModuleType("user_module"), ModuleType("other_module")
    user.all_reduce, user.broadcast = original, "not the function"  # type: ignore[attr-defined]
    other.all_reduce = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user_module", user)
    monkeypatch.setitem(sys.modules, "other_module", other)
    wrappers.patch(distributed_c10d)
    wrappers.patch_copies()
    wrapper: Any = distributed_c10d.all_reduce
    assert wrapper is not original and wrapper.__wrapped__ is original
    assert user.all_reduce is wrapper and torch.distributed.all_reduce is wrapper
    assert user.broadcast == "not the function" and other.all_reduce is len
    assert _functional_collectives.legacy_allreduce is wrapper, "torch gives it another name there"
    wrappers.undo()
    assert distributed_c10d.all_reduce is user.all_reduce is torch.distributed.all_reduce is original
    assert _functional_collectives.legacy_allreduce is original


class Recorder:
    """The owner of wrappers that record the calls of one member of a communicator."""

    def __init__(self) -> None:
        rings = open_beacon("run-1", "policy-0", "policy", 0).call_rings()
        assert rings is not None
        self.rings, self.sites, self.member_cache = rings, CallSites(rings, torch.__file__), dict[Any, Any]()
        self.number = 0
        slot = rings.open_slot(77, 2, "0", "", "gloo", 2, 0)
        group = SimpleNamespace(_get_sequence_number_for_group=lambda: self.number)
        self.only = CommunicatorMember(group, slot, "0", "0", [0, 1], 0)
        self.only.run = "run-1"

    def member(self, group: Any) -> CommunicatorMember:
        return self.only

    def record_failure(self, error: Exception) -> None:
        raise error

    def translate(self, error: Exception) -> Exception:
        return error


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield Recorder()
    close_beacon()


def test_calls_after_a_refused_one_are_counted(recorder: Recorder) -> None:
    recorder.only.order_check = OrderCheck("run-1", 77, 0, "policy-0", 0)
    OrderCheck("run-1", 77, 1, "policy-1", 0).enter(1, 999)
    original = distributed_c10d.monitored_barrier
    wrapper = CollectiveWrappers(recorder, torch).wrapper_of(original, OPERATIONS["monitored_barrier"])
    with pytest.raises(CollectiveRefused):
        wrapper()
    recorder.number = 3  # calls from C++, say
    assert recorder.only.collectives == 3


def test_a_repeated_call_with_a_list_of_tensors_is_described_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []

    def describe(*arguments: Any) -> tuple[int, str]:
        described.append(arguments)
        return describe_call(*arguments)

    monkeypatch.setattr("lockstep.watch.recorder.wrappers.describe_call", describe)
    made = CollectiveWrappers(recorder, torch)

    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        recorder.number += 1

    wrapper = made.wrapper_of(all_gather, OPERATIONS["all_gather"])
    for size, dtype in [(4, torch.float32)] * 9 + [(5, torch.float32), (4, torch.float16), (4, torch.float32)]:
        own = torch.ones(size, dtype=dtype)
        wrapper([torch.ones(size, dtype=dtype), own], own)
    calls = read_calls(current_beacon().path, 0)
    assert [call.shapes for call in calls] == ["[4], [4]"] * 9 + ["[5], [5]", "[4], [4]", "[4], [4]"]
    assert [call.dtype for call in calls[-3:]] == ["float32", "float16", "float32"]
    assert len({call.signature for call in calls}) == 3 and len(described) == 3


FORKED = """
import gc, os, sys
from pathlib import Path
import torch, torch.distributed.fsdp, transformers.modeling_utils
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder import recorder

def written() -> int:
    rows = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Private_Dirty"].split()[0]) // 1024

def every_value() -> None:
    for module in list(sys.modules.values()):
        list(vars(module).values()) if hasattr(module, "__dict__") else None

def install() -> None:
    open_beacon(sys.argv[1], "policy-0", "policy", 0)
    recorder.install(refuse=True, keepalive=True, scope="x")

gc.collect()
gc.freeze()
for work in (every_value, install):
    if os.fork() == 0:
        before = written()
        work()
        print(written() - before, flush=True)
        os._exit(0)
    os.wait()
"""


def test_recording_writes_to_few_pages_of_a_forked_worker() -> None:
    run = new_run_id("pages")
    try:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, run], capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        shutil.rmtree(run_shm_dir(run), ignore_errors=True)
    everything, recording = map(int, done.stdout.split())
    assert recording < everything / 2, f"{recording} MiB, and {everything} MiB if every value is read"
