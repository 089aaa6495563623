"""What sampling a GPU costs, and what its figures are while it computes, copies, only waits, or does nothing.

`waiting` is a kernel of one thread that counts cycles: it stands for a kernel of NCCL that waits for another rank.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.measurements import Record, device_of, synchronize
from benchmarks.gpu.sizes import Sizes
from lockstep.watch.devices.device_history import shows_idleness, shows_movement
from lockstep.watch.devices.device_samples import DeviceSample
from lockstep.watch.devices.nvml_reader import NvmlReader

SETTLE_S = 1.5
"""NVML's figures cover up to a second, so that the first ones are of what was before."""
EVERY_S = 0.25
CYCLES = 200_000_000
"""Of a waiting kernel: about a tenth of a second."""


def sampling(reader: NvmlReader, sizes: Sizes, load_s: float) -> Record:
    """Milliseconds of a round over all GPUs, and for each load its figures and how many samples prove movement or
    idleness. Figures that the driver does not report are left out."""
    index = _index(reader, sizes)
    reader.read(lambda number: None)
    loads = {name: _measure(reader, index, load, load_s) for name, load in _loads(sizes).items()}
    rounds = [_round_ms(reader) for _ in range(20)]
    return {
        "gpus": len(reader.gpus),
        "round_ms": statistics.median(rounds),
        "longest_round_ms": max(rounds),
        "loads": loads,
    }


def _index(reader: NvmlReader, sizes: Sizes) -> int:
    """The driver's number of the GPU that torch uses, which CUDA_VISIBLE_DEVICES may number otherwise."""
    if sizes.device != "cuda":
        return 0
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return next(each.index for each in reader.gpus if each.uuid.endswith(uuid))


def _loads(sizes: Sizes) -> dict[str, Callable[[], object]]:
    """A piece of each load, about a tenth of a second or less, that ends with a synchronisation."""
    device = device_of(sizes)
    one, other = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def on_device(work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            work()
            synchronize(device)

        return run

    waits = (lambda: torch.cuda._sleep(CYCLES)) if device.type == "cuda" else (lambda: time.sleep(0.05))
    return {
        "nothing": lambda: time.sleep(0.05),
        "waiting": on_device(waits),
        "product": on_device(lambda: one @ other),
        "copy": on_device(lambda: target.copy_(source)),
    }


def _measure(reader: NvmlReader, index: int, load: Callable[[], object], load_s: float) -> Record:
    """Samples the GPU while the load runs."""
    found: list[DeviceSample] = []
    end = time.monotonic() + load_s
    with _sampling_thread(reader, index, found):
        while time.monotonic() < end:
            load()
    figures = {
        "busy": [each.busy for each in found],
        "memory_busy": [each.memory_busy for each in found],
        "power_share": [_power_share(each) for each in found],
    }  # fmt: skip
    known = {name: [each for each in values if each is not None] for name, values in figures.items()}
    return {
        "samples": len(found),
        "moving": sum(map(shows_movement, found)),
        "idle": sum(map(shows_idleness, found)),
        **{name: statistics.mean(values) for name, values in known.items() if values},
    }


def _power_share(sample: DeviceSample) -> float | None:
    return sample.power_w / sample.power_limit_w if sample.power_w is not None and sample.power_limit_w else None


@contextmanager
def _sampling_thread(reader: NvmlReader, index: int, found: list[DeviceSample]) -> Iterator[None]:
    done = threading.Event()

    def sample() -> None:
        began = time.monotonic()
        while not done.wait(EVERY_S):
            read = [each for each in reader.read(lambda number: None) if each.index == index and not each.parent]
            found.extend(read if time.monotonic() - began > SETTLE_S else ())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(30)


def _round_ms(reader: NvmlReader) -> float:
    began = time.perf_counter()
    reader.read(lambda number: None)
    return 1e3 * (time.perf_counter() - began)
