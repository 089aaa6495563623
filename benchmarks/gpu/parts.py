"""The parts of `script/gpu`, and what one of them does in its process: `python -m benchmarks.gpu.parts NAME FILE`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.device_sampling import sampling
from benchmarks.gpu.measurements import Record, ceilings, decode, finite, sft
from benchmarks.gpu.sizes import DRY, GPU, Shape, Sizes
from benchmarks.runner import ROOT, Match, peer_installed
from benchmarks.workloads import TOY, WORKS, Side, Work, merged, quick
from lockstep.models.tiny_model import TinyModel
from lockstep.watch.devices.nvml_reader import NvmlReader


class PartUnavailable(Exception):
    """What the part needs is not at hand."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    title: str
    minutes: float
    """It is killed when it takes longer."""
    run: Callable[[Sizes, Path], Record]


def _tests(*files: str, dry: str = "") -> Callable[[Sizes, Path], Record]:
    """Runs test files by pytest; the record counts what came of the tests. The dry run has only the tests that match
    `dry`."""

    def run(sizes: Sizes, scratch: Path) -> Record:
        report = scratch / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        if sizes is DRY and dry:
            command += ["-k", dry]
        environment = {**os.environ, "LOCKSTEP_TEST_DEVICE": sizes.device}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: see the part's log")
        return junit_counts(report)

    return run


def junit_counts(report: Path) -> Record:
    """How many tests passed, were skipped or failed, and which failed, of a JUnit file."""
    found: Record = {"passed": 0, "skipped": 0, "failed": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    return found


def grpo(sizes: Sizes, scratch: Path) -> Record:
    """Whole GRPO steps beside TRL, which generates with transformers; both in bf16 with fp32 weights."""
    if not peer_installed():
        raise PartUnavailable("TRL is not in build/peer: `script/benchmark` installs it there")
    found = {}
    for shape in sizes.shapes:
        work, model = grpo_work(shape, sizes)
        repeats, taken = min(3, sizes.repeats), {side.name: [] for side in work.sides}  # type: dict[str, list[float]]
        with Match(work, repeats, scratch / shape.name, print, model) as match:
            for repeat in range(repeats):
                for side in work.sides:
                    measured = match.measure(side, repeat)
                    taken[side.name].append(measured.wall_s / measured.steps)
        found[shape.name] = taken
    return found


def grpo_work(shape: Shape, sizes: Sizes) -> tuple[Work, TinyModel]:
    """16 prompts of 256 tokens with 8 completions of 256; the vocabulary is that of single characters on both sides."""
    work = replace(WORKS["fixed"], name=f"grpo-{shape.name}", prompt_tokens=256, max_tokens=256, details=0)
    if sizes is DRY:
        return quick(work), TOY
    model = TinyModel(
        hidden=shape.hidden, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, ffn=shape.ffn,
        max_length=1024, seed=1,
    )  # fmt: skip
    return replace(work, sides=tuple(_on_gpu(side) for side in work.sides[:2])), model


def _on_gpu(side: Side) -> Side:
    if side.program == "lockstep":
        return replace(side, settings=merged(side.settings, {"cluster": {"device": "cuda"}}))
    return replace(side, settings=side.settings | {"use_cpu": False, "bf16": True})


def devices(sizes: Sizes, scratch: Path) -> Record:
    """The sampling of GPUs, with whatever driver there is."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError as error:
        raise PartUnavailable("the package nvidia-ml-py is not installed") from error
    except pynvml.NVMLError as error:
        raise PartUnavailable(f"NVML does not start: {error}") from error
    reader = NvmlReader(pynvml)
    reader.open()
    if not reader.gpus:
        raise PartUnavailable("NVML lists no GPU")
    return sampling(reader, sizes, load_s=2.5 if sizes is DRY else 8.0)


PARTS = {
    part.name: part
    for part in (
        Part("ceilings", "matrix product and copy of the device", 2, ceilings),
        Part("policy", "policy, engine and runs on one GPU", 9, _tests("tests/gpu/test_cuda.py")),
        Part(
            "trainer",
            "the trainer's contract on CUDA and NCCL",
            6,
            _tests("tests/contract/test_trainer.py", dry="one and plain"),
        ),
        Part("weights", "weights by CUDA IPC and NCCL", 5, _tests("tests/gpu/test_weight_streams_cuda.py")),
        Part("watch", "recorder, flight recorder and host check", 5, _tests("tests/gpu/test_watch_cuda.py")),
        Part("devices", "sampling of GPUs: its cost, and figures under load", 3, devices),
        Part("sft", "SFT: tokens per second, MFU, memory", 6, sft),
        Part("decode", "builtin engine: tokens per second beside the memory's limit", 6, decode),
        Part("grpo", "GRPO steps beside TRL", 9, grpo),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("file", type=Path, help="where the record goes")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    record: dict[str, Any]
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as scratch:
        try:
            record = PARTS[options.name].run(DRY if options.cpu else GPU, Path(scratch))
        except PartUnavailable as reason:
            record = {"unavailable": str(reason)}
        else:
            if "passed" not in record and not finite(record):
                raise RuntimeError(f"a number of the record cannot be right: {record}")
    options.file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
