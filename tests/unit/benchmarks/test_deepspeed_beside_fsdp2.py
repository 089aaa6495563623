"""The benchmark of DeepSpeed's stages beside FSDP2: its table, and the whole command, small."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.deepspeed_beside_fsdp2 import ROOT, check_losses, table


def line(variant, repeat, cpu_s, step_bytes, losses=(4.0, 3.0)):
    work = {"ranks": 2, "microbatches": 2, "tokens": 32, "steps": 2, "parameters": 1_500_000, "load": 1.0}
    found = {"losses": list(losses), "cpu_s": cpu_s, "wall_s": cpu_s / 2, "load_bytes": 7e6, "step_bytes": step_bytes}
    return {"variant": variant, "repeat": repeat, **work, **found}


def test_ratios_are_medians_of_those_within_a_repeat():
    lines = []
    for repeat, (base, ratio) in enumerate([(1.0, 3.0), (10.0, 1.0), (2.0, 2.0)]):
        lines += [line("fsdp2", repeat, base, 40e6), line("3", repeat, base * ratio, 60e6)]
    made = table(lines)
    assert "| FSDP2 | 2.00 | 1.00 | 7 | 40 | 1.00 |" in made
    assert "| stage 3 | 4.00 | 2.00 | 7 | 60 | 1.50 |" in made
    assert "Medians of 3 repeats of 2 steps of a model with 1.5 million parameters (6 MB) on 2 gloo ranks" in made[-1]


def test_other_losses_are_refused():
    check_losses(line("fsdp2", 0, 1.0, 1.0), line("1", 0, 1.0, 1.0, (4.000009, 3.0)))
    for losses in [(4.0, 3.00002), (4.0, float("nan"))]:
        with pytest.raises(SystemExit, match="1 computes another loss than fsdp2"):
            check_losses(line("fsdp2", 0, 1.0, 1.0), line("1", 0, 1.0, 1.0, losses))


PEAK = """
import mmap
from benchmarks.deepspeed_beside_fsdp2 import memory, reset_peak
size = 64 << 20
with mmap.mmap(-1, size) as held:
    held[::4096] = b"x" * (size // 4096)
    now, high = memory("VmRSS"), memory("VmHWM")
    assert high >= now >= size
reset_peak()
assert memory("VmHWM") <= high - size // 2
"""


@pytest.mark.slow
def test_the_peak_is_that_since_it_was_reset():
    subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, check=True)


@pytest.mark.deepspeed
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
def test_a_small_repeat(tmp_path):
    out = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "benchmarks.deepspeed_beside_fsdp2", "--quick", "--out", str(out)]
    done = subprocess.run([*command, "--variants", "fsdp2", "3"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["variant"] for each in lines] == ["fsdp2", "3"]
    assert all(each["cpu_s"] > 0 and each["step_bytes"] > 0 and len(each["losses"]) == 3 for each in lines)
    assert "\n".join(table(lines)) in done.stdout
