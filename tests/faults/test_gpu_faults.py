"""A real agent and a real supervisor beside a driver of C that answers as NVIDIA's does: what GPUs say of workers."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.watch.devices.xid_errors import HARDWARE_XIDS, PROGRAM_XIDS
from tests.faults.test_supervisor import PATIENCE, Site, site, until
from tests.unit.watch.devices.fake_nvml import FakeNvml, nvml

__all__ = ["nvml", "site"]


def begin(site: Site, nvml: FakeNvml, what: str, **figures: object) -> None:
    """Starts the workers; `policy-1` uses the GPU according to the driver."""
    nvml.set(gpu0__minor=None)  # these workers have no device file open
    site.start(what)
    nvml.set(gpu0__processes=f"{site.pids['policy-1']}:1073741824", **figures)


def incident_file(path: str | None, name: str) -> Any:
    assert path is not None
    return json.loads((Path(path) / name).read_text())


def test_a_lost_gpu_names_the_rank_that_uses_it(nvml: FakeNvml, site: Site) -> None:
    begin(site, nvml, "sleep", gpu0__busy=97, gpu0__memory_busy=40)
    time.sleep(2.5)  # two samples
    nvml.set(gpu0__lost=15)
    site.start_fault()
    event = site.until_event("policy-1", "confirmed", seconds=20.0)
    assert (event.verdict["kind"], event.verdict["class"]) == ("device", "gpu_hardware_fault")
    assert "uses GPU 0, which has failed: the driver says: GPU is lost" in event.headline
    (host,) = incident_file(event.incident, "devices.json").values()
    assert host["devices"][0]["sample"]["lost"] == "GPU is lost" and host["uses"][0].get("source", "driver") == "driver"
    site.supervision.close()
    (total,) = json.loads((site.folder / "devices.json").read_text())
    assert (total["device"], total["processes"], total["busy"]) == ("GPU 0", ["policy-1"], pytest.approx(97, abs=97))
    assert total["errors"] == ["the driver says: GPU is lost"]


def test_an_xid_names_the_rank_whose_device_it_is(nvml: FakeNvml, site: Site) -> None:
    begin(site, nvml, "sleep")
    time.sleep(2.5)
    site.start_fault()
    nvml.set(event="1 0 119", gpu0__busy=100)
    event = site.until_event("policy-1", "confirmed", seconds=20.0)
    assert event.verdict["kind"] == "device" and "Xid 119" in event.headline


@pytest.mark.slow
def test_a_long_kernel_is_not_confirmed_until_the_device_rests(nvml: FakeNvml, site: Site) -> None:
    begin(site, nvml, "sleep", gpu0__busy=100, gpu0__memory_busy=63, gpu0__power=560_000)
    site.start_fault()
    site.until_event("policy-1", "notice")
    time.sleep(2.5 * PATIENCE.still_s)
    assert not site.about("policy-1", "confirmed", "act"), "its kernel works"
    nvml.set(gpu0__busy=0, gpu0__memory_busy=0, gpu0__power=70_000)
    event = site.until_event("policy-1", "confirmed", seconds=5 * PATIENCE.still_s)
    assert any("no kernel has run for" in each["text"] for each in event.verdict["evidence"])


@pytest.mark.slow
def test_a_driver_that_does_not_answer_stops_neither_agent_nor_verdicts(nvml: FakeNvml, site: Site) -> None:
    begin(site, nvml, "slow")
    time.sleep(2.5)
    nvml.set(gpu0__hang=1)
    time.sleep(14.0)  # the bound for a call is ten seconds
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    began = time.time()
    event = site.until_event("policy-1", "confirmed")
    assert event.verdict["kind"] == "dead" and event.wall - began < 5.0
    until(lambda: event.incident, 5, "the incident is written")
    gaps = incident_file(event.incident, "verdict.json")["gaps"]
    assert any("the driver of the GPUs has not answered a call about GPU 0 for" in each for each in gaps)


def test_the_table_of_xids_is_that_of_the_knowledge_base() -> None:
    """The doctor reads the same errors in logs."""
    signatures = {rule.signature.id: rule.signature for rule in load_knowledge().rules}
    for name, codes in (("xid-hardware", HARDWARE_XIDS), ("xid-software", PROGRAM_XIDS)):
        pattern = re.compile(str(signatures[name].pattern))
        for code in range(1, 200):
            line = f"NVRM: Xid (PCI:0000:9b:00): {code}, pid=1, name=python, something"
            assert bool(pattern.search(line)) == (code in codes), (name, code)
