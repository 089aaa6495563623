"""What native stacks add to what is known of a process that uses a core."""

import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.base.folders import new_run_id
from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.procfs import py_spy


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_native_frames_tell_a_wait_for_a_device_from_a_busy_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below `.item()` of a tensor on a GPU: Python shows only the line that calls, and the call uses a core."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    run = new_run_id("native")
    source, library = tmp_path / "runtime.c", tmp_path / "libruntime.so"
    source.write_text(
        "volatile int n; int cudaStreamSynchronize(void) { for (;;) n++; }\nint multiply(void) { for (;;) n++; }"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-g", "-o", str(library), str(source)], check=True)
    program = (
        "import ctypes, sys; from lockstep.watch.beacon.writer import open_beacon\n"
        f"open_beacon({run!r}, sys.argv[1], 'policy', int(sys.argv[1][-1])); runtime = ctypes.CDLL({str(library)!r})\n"
        "print('up', flush=True); getattr(runtime, sys.argv[2])()"
    )
    calls = {"policy-1": "cudaStreamSynchronize", "policy-2": "multiply"}
    workers = [
        subprocess.Popen([sys.executable, "-c", program, *each], stdout=subprocess.PIPE, text=True)
        for each in calls.items()
    ]
    monitor = ProcessMonitor(run)
    with selectors.DefaultSelector() as selector:
        sampler = py_spy.StackSampler(selector)

        def sample(native: bool) -> None:
            for process in monitor.tracked.values():
                store = process.store_native_stacks if native else process.store_stacks
                now = time.monotonic_ns()
                sampler.request(process.pid, lambda threads, store=store, now=now: store(threads, now), native)
            end = time.monotonic() + 30.0
            while sampler.busy:
                assert time.monotonic() < end
                for key, mask in selector.select(0.1):
                    key.data(mask)

        try:
            for worker in workers:
                assert worker.stdout is not None and worker.stdout.readline() == "up\n"
            time.sleep(0.2)
            for _ in range(3):
                monitor.sample({})
                sample(native=False)
                time.sleep(0.5)
            both = [monitor.tracked[name] for name in calls]
            for process in both:
                process.progress_ns = 1  # as if it had made none for long
            time.sleep(0.5)
            monitor.sample({})
            assert [each.needs_native_stack(0.2) for each in both] == [True, True]
            sample(native=True)
            assert [each.waits_for_device for each in both] == [True, False]
            assert not any(each.needs_native_stack(0.2) for each in both), "its process is stopped once"
        finally:
            sampler.close()
            for worker in workers:
                worker.kill()
                worker.communicate()
