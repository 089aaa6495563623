"""Builds `fake_nvml.c` as libnvidia-ml.so.1: everything above the C boundary, nvidia-ml-py included, is real."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")


class FakeNvml:
    """A library, and the file with the figures of its GPUs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
        pytest.importorskip("pynvml")
        if COMPILER is None:
            pytest.skip("there is no C compiler")
        library = folder / "libnvidia-ml.so.1"
        command = [COMPILER, "-shared", "-fPIC", "-O1", *options, "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True, timeout=60)
        self.library, self._figures = library, folder / "figures"
        self._values: dict[str, object] = {}
        monkeypatch.setenv("FAKE_NVML", str(self._figures))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))  # of the child
        monkeypatch.setattr("lockstep.watch.devices.device_sampler.NVML_LIBRARY", str(library))  # of this process
        self.set(count=1, **gpu(0))

    def set(self, **values: object) -> None:
        """Sets figures; `gpu0__busy=3` is the line `gpu0.busy 3`. None removes one."""
        self._values |= values
        lines = [f"{name.replace('__', '.')} {value}" for name, value in self._values.items() if value is not None]
        new = self._figures.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._figures)


def gpu(index: int, **values: object) -> dict[str, object]:
    """The figures of a GPU with nothing to do."""
    figures = {
        "uuid": f"GPU-{index}0000000-0000-0000-0000-000000000000", "name": "NVIDIA H100 80GB HBM3", "minor": index,
        "busy": 0, "memory_busy": 0, "memory_total": 80 << 30, "memory_used": 1 << 30, "power": 70_000,
        "power_limit": 700_000, "sm_clock": 1980, "sm_clock_max": 1980, "temperature": 34, "reasons": 1,
        "uncorrected": 0, "processes": "",
    }  # fmt: skip
    return {f"gpu{index}__{name}": value for name, value in {**figures, **values}.items()}


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield FakeNvml(tmp_path, monkeypatch)
