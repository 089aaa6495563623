"""Copies of torch.distributed's functions that other modules have imported before a job is recorded."""

import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _functional_collectives, distributed_c10d

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.watch.recorder.wrappers import CollectiveWrappers


@pytest.fixture
def wrappers() -> Any:
    owner: Any = SimpleNamespace(rings=SimpleNamespace(on_turnover=[], words=[]), sites=None, member_cache={})
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
