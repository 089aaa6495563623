"""What `script/gpu` runs: its dry run on this CPU, its table, what it does with a part that fails, hangs or is done."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import host_facts
from benchmarks.gpu.gpu_table import table
from benchmarks.gpu.parts import PARTS, junit_counts
from benchmarks.gpu.sizes import GPU, Shape
from benchmarks.runner import ROOT
from tests.unit.watch.devices.fake_nvml import FakeNvml

HOST = {"gpus": ["NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, 700 W, 1980 MHz"], "torch": "2.11.0",
        "transformers": "5.17.0", "nccl": "2.28.9", "date": "2026-11-26 10:00 UTC"}  # fmt: skip


def part(seconds=10.0, **more):
    return {"outcome": "done", "seconds": seconds, "host": HOST, "source": "x", **more}


def test_every_part_has_a_limit_under_ten_minutes_and_is_known_by_the_command():
    assert tuple(PARTS) == command.NAMES
    assert all(each.minutes < 10 for each in PARTS.values())


def test_parameters_are_those_of_the_published_models():
    """Qwen2.5's model cards: 0.49 B and 1.54 B parameters, 0.36 B and 1.31 B without embeddings."""
    for shape, without in zip(GPU.shapes, (0.36e9, 1.31e9), strict=True):
        assert shape.matrices - shape.hidden * shape.vocabulary == pytest.approx(without, rel=0.01)


def test_parameters_and_cache_are_those_of_the_model(tmp_path):
    from transformers import AutoModelForCausalLM, DynamicCache

    shape = Shape("toy", 32, 2, 4, 2, 64, vocabulary=128, length=64)
    model = AutoModelForCausalLM.from_pretrained(shape.write(tmp_path, torch.device("cpu")))
    wide = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
    assert shape.matrices == wide  # the head is the embeddings
    cache = DynamicCache()
    model(torch.arange(4, 11)[None], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 7
    assert shape.cache_bytes * 7 == sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)


def test_the_table_has_shares_of_what_the_device_can_do():
    speed = {"0.5B": {"tokens": 60_000, "seconds": 2.0, "flops_per_s": 4e14, "peak_bytes": 3 * 2**29,
                      "estimate": {"weights": 2**30, "logits": 2**30}}}  # fmt: skip
    parts = {
        "ceilings": part(record={"flops": 8e14, "bytes_per_s": 3e12}),
        "trainer": part(record={"passed": 40, "skipped": 2, "failed": []}),
        "weights": {**part(), "outcome": "failed", "why": "its process ended with 1"},
        "sft": part(record=speed),
        "decode": part(record={"0.5B": {"64": {"tokens_per_s": 48_000.0, "bytes_per_step": 2e9}}}),
        "devices": part(
            record={
                "gpus": 1,
                "round_ms": 4.25,
                "longest_round_ms": 51.0,
                "loads": {"waiting": {"samples": 9, "moving": 0, "idle": 0, "busy": 100.0, "power_share": 0.17}},
            }
        ),
        "grpo": part(record={"0.5B": {"lockstep": [1.0, 2.0, 9.0], "trl": [5.0]}}),
    }
    text = table({"parts": parts})
    for line in (
        f"{HOST['gpus'][0]}; torch 2.11.0, transformers 5.17.0, NCCL 2.28.9, 2026-11-26",
        "| trainer | 40 | 2 | 0 | 10 |",
        "| weights | failed: its process ended with 1 | | | 10 |",
        "Matrix product in bf16: 800 TFLOP/s; copy: 3000 GB/s, read and written.",
        "| 0.5B | 30,000 | 400.0 | 50% | 1.50 GiB | 2.00 GiB |",
        "| 0.5B | 64 | 48,000 | 96,000 | 50% |",
        "| 0.5B | 2.00 | 5.00 | 2.50 |",
        "| waiting | 100% |  | 17% | 9 | 0 | 0 |",
        "A sample of all GPUs (1) takes 4.2 ms, at most 51.0.",
    ):
        assert line in text.splitlines(), text
    assert table({"parts": {}}) == "No results yet.\n"


@pytest.mark.slow
def test_the_sampling_of_gpus_is_measured_where_there_is_a_driver(tmp_path, monkeypatch):
    FakeNvml(tmp_path, monkeypatch).set(gpu0__busy=100, gpu0__memory_busy=44, gpu0__power=350_000)
    done = _run("--cpu", "devices", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]["devices"]["record"]
    assert list(record["loads"]) == ["nothing", "waiting", "product", "copy"] and 0 < record["round_ms"] < 1000
    for each in record["loads"].values():
        assert (each["busy"], each["memory_busy"], each["power_share"], each["idle"]) == (100, 44, 0.5, 0)
        assert each["moving"] == each["samples"] > 0


def test_tests_are_counted_from_their_report(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip\ndef test_no(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_fixture(broken): pass\n"
    )
    report = tmp_path / "junit.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", tmp_path, f"--junitxml={report}", tmp_path],
        cwd=tmp_path, capture_output=True, timeout=120,
    )  # fmt: skip
    counts = junit_counts(report)
    assert (counts["passed"], counts["skipped"]) == (1, 1)
    assert [each.rpartition("::")[2] for each in counts["failed"]] == ["test_bad", "test_fixture"]


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path, monkeypatch):
    program = (
        "import subprocess,sys,time; p=subprocess.Popen(['sleep','600']); print(p.pid,flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(command.sys, "executable", _script(tmp_path / "python", program))
    found = command.run_part("sft", tmp_path, cpu=True, limit_s=3.0)
    assert found == {"outcome": "failed", "why": "took longer than 3 s"}
    child = int((tmp_path / "sft.log").read_text())
    end = time.monotonic() + 30.0
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it was killed"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_part_ends_with_the_command(tmp_path):
    """Who gives a machine back sends SIGTERM."""
    program = (
        "import sys; from benchmarks.gpu import __main__ as command; "
        f"sys.argv = ['gpu', '--cpu', 'trainer', '--out', {str(tmp_path)!r}]; command.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": "src:."})
    end = time.monotonic() + 120.0
    try:
        while not (parts := [each for each in psutil.Process(process.pid).children() if each.name() != "nvidia-smi"]):
            assert time.monotonic() < end, "it starts the part"
            time.sleep(0.05)
    finally:
        process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert psutil.wait_procs(parts, timeout=30)[1] == []


def test_help_wheels_and_table_need_no_package(tmp_path):
    for option in ("--help", "--wheels", "--table"):
        command_line = [sys.executable, "-S", "-m", "benchmarks.gpu", option, "--out", str(tmp_path)]
        done = subprocess.run(command_line, cwd=ROOT, env={}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if option == "--wheels":
            assert done.stdout.split() == host_facts.wanted_wheels()


def _script(path: Path, program: str) -> str:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    path.chmod(0o755)
    return str(path)


def test_results_of_other_sources_are_measured_again_and_those_of_these_are_not(tmp_path, monkeypatch, capsys):
    ran, out = [], ["--out", str(tmp_path)]
    monkeypatch.setattr(command, "run_part", lambda name, *rest: ran.append(name) or {"outcome": "done", "record": {}})
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "sft", "decode", *out])
    command.main()
    assert ran == ["sft", "decode"]
    results = json.loads((tmp_path / "results.json").read_text())
    results["parts"]["decode"]["source"] = "older"
    (tmp_path / "results.json").write_text(json.dumps(results))
    command.main()
    assert ran == ["sft", "decode", "decode"] and "sft: has a result already" in capsys.readouterr().out
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--cpu", "--again", "--minutes", "7", "sft", "grpo", "--out", str(tmp_path)]
    )
    command.main()
    assert ran[3:] == ["sft"] and "grpo: left for another call, it may take 9 minutes" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_without_a_gpu_it_says_so(tmp_path):
    done = _run("--out", str(tmp_path))
    assert done.returncode == 1 and "there is no CUDA device here: `script/gpu --cpu` is the dry run" in done.stderr


def test_the_wheels_complete_the_packages_of_an_image_with_pytorch():
    pins = dict(each.split("==") for each in host_facts.wanted_wheels())
    lock = (ROOT / "requirements.lock").read_text()
    assert [name for name, version in pins.items() if f"\n{name}=={version} " not in lock] == []
    needed = _closure("lockstep-rl", {"train"}) | _closure("pytest", set()) | _closure("hypothesis", set())
    needed |= _closure("nvidia-ml-py", set())
    needed -= set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements-cuda.lock").read_text(), re.M))  # torch's own
    assert sorted(needed - set(pins) - set(host_facts.BESIDE_TORCH) - {"lockstep-rl"}) == []
    assert sorted(set(pins) - needed) == [], "named, and not needed"


def _closure(name: str, extras: set[str]) -> set[str]:
    """Normalized names of a distribution and all that it needs under Python 3.12 on Linux."""
    found, left = set(), [(name, extras)]
    while left:
        name, extras = left.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in found and not extras:
            continue
        try:
            wanted = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another system, or not needed here
        found.add(name)
        for each in map(Requirement, wanted):
            if any(
                each.marker is None or each.marker.evaluate({"extra": extra, "python_version": "3.12"})
                for extra in extras or {""}
            ):
                left.append((each.name, each.extras))
    return found


def _run(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [ROOT / "script" / "gpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, **options
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run_goes_through_every_part(tmp_path):
    done = _run("--cpu", "--minutes", "120", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert set(parts) == set(command.NAMES)
    assert {name for name, each in parts.items() if each["outcome"] != "done"} <= {"grpo", "devices"}, (
        "TRL or a driver may not be at hand"
    )
    assert parts["trainer"]["record"]["passed"] > 0
    if not torch.cuda.is_available():
        assert all(parts[name]["record"]["skipped"] > 0 for name in ("policy", "weights", "watch"))
    assert "| toy |" in done.stdout
