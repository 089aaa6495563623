"""Jobs that end well and look troubled, without a process group: `noisy_jobs.py WHAT`."""

import asyncio
import concurrent.futures
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

what = sys.argv[1]
draw = random.Random(what)


def say(text):
    print(text, flush=True)


def keras_like():
    warnings.warn(
        "`lr` is deprecated, please use `learning_rate`, this will raise an error from version 4",
        DeprecationWarning,
        stacklevel=1,
    )
    for epoch in range(1, 13):
        time.sleep(0.15)
        say(f"Epoch {epoch}/40")
        say(
            f"45/45 [==============================] - {draw.randint(8, 14)}s 211ms/step - loss: {1 / epoch:.4f} - val_loss: {0.2 + 1 / epoch:.4f}"
        )
        if epoch > 9:
            say(f"val_loss did not improve from 0.31{epoch}")
    say("Restoring model weights from the end of the best epoch: 9.")
    say("Epoch 12: early stopping")


def boosting():
    for n in range(60):
        time.sleep(0.02)
        error = 0.4 * math.exp(-n / 15) + 0.08
        say(f"[{n}]\ttrain-error:{error:.5f}\teval-error:{error + 0.02:.5f}")
    say("best iteration 51, eval-error 0.11334; model written to model.ubj")


def sweep():
    done = failed = 0
    for trial in range(12):
        time.sleep(0.1)
        rate = 10 ** draw.uniform(-5, 1)
        if rate > 1:
            failed += 1
            say(
                f"[W 2026-11-27 14:0{trial % 10}:11,402] Trial {trial} failed with parameters: {{'lr': {rate:.4f}}} because of: The value nan is not acceptable."
            )
            continue
        done += 1
        say(
            f"[I 2026-11-27 14:0{trial % 10}:11,402] Trial {trial} finished with value: {draw.uniform(0.2, 0.9):.4f} and parameters: {{'lr': {rate:.6f}}}."
        )
    say(f"study complete: {done} trials finished, {failed} failed, best value 0.2117")


def self_check():
    with socket.socket() as probe:
        try:
            probe.connect(("127.0.0.1", 9))
        except ConnectionRefusedError as error:
            say(f"check refused-port ........ ok (expected {error})")
    try:
        open("/nonexistent/file")
    except FileNotFoundError as error:
        say(f"check missing-file ........ ok (expected {error})")
    try:
        1 / 0
    except ZeroDivisionError as error:
        say(f"check bad-arithmetic ...... ok (expected {error!r})")
    say("check out-of-memory path .. ok (MemoryError handled)")
    say("====== 4 passed, 0 failed, 0 errors in 0.31s ======")


def heartbeats():
    for n in range(40):
        time.sleep(0.08)
        if n in (11, 12, 27):
            say(
                f"{time.strftime('%H:%M:%S')} WARN  monitor   no heartbeat from worker-2 for {3 if n != 12 else 6} s (limit 30 s)"
            )
        elif n in (13, 28):
            say(f"{time.strftime('%H:%M:%S')} INFO  monitor   worker-2 is back, it was compiling")
        else:
            say(f"{time.strftime('%H:%M:%S')} INFO  trainer   update {n:3d} return {draw.uniform(0, 1) + n / 20:.3f}")
    say(f"{time.strftime('%H:%M:%S')} INFO  trainer   target return reached, exiting cleanly")


def idle_queue():
    for n in range(30):
        time.sleep(0.1)
        if n % 3 == 2:
            say("timed out waiting for new requests (5.0 s), still idle")
        else:
            say(f"request {n}: 64 tokens in {draw.uniform(0.1, 0.3):.2f} s, queue 0, running 0, failed 0")


def reconnect():
    ready = threading.Event()

    def server():
        ready.wait()
        with socket.create_server(("127.0.0.1", int(os.environ["PORT"]))) as listener:
            while True:
                listener.accept()[0].close()

    threading.Thread(target=server, daemon=True).start()
    for attempt in range(1, 9):
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["PORT"])), 1).close()
            say(f"connected to the parameter store (attempt {attempt})")
            break
        except OSError as error:
            say(f"ERROR: cannot reach the parameter store: {error}; reconnecting in 0.4 s")
            time.sleep(0.4)
            if attempt == 4:
                ready.set()
    for step in range(1, 41):
        time.sleep(0.05)
        if step % 5 == 0:
            say(f"iter={step} loss={3 / step:.4f} lag=0")
    say("bye")


def leaked():
    from multiprocessing import shared_memory

    kept = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(3)]
    for step in range(20):
        time.sleep(0.05)
        say(f"step={step:04d} buf={kept[0].size} loss={2 / (step + 1):.4f}")
    say("run finished")


def slow_samples():
    def give_up(*_):
        raise TimeoutError("sample took longer than 1 s")

    signal.signal(signal.SIGALRM, give_up)
    good = 0
    for n in range(24):
        signal.alarm(1)
        try:
            time.sleep(1.3 if n in (7, 15) else 0.05)
            good += 1
        except TimeoutError as error:
            say(f"sample {n}: {error}, skipped")
        finally:
            signal.alarm(0)
        if n % 4 == 3:
            say(f"{n + 1}/24 samples judged")
    say(f"judged {good} samples, 2 timeouts, exit")


def pool_again():
    parts, pool = list(range(16)), None
    while parts:
        pool = pool or concurrent.futures.ProcessPoolExecutor(2)
        part = parts[0]
        try:
            say(f"part {pool.submit(work, part, not Path('once').exists() and part == 6).result()} written")
            parts.pop(0)
        except concurrent.futures.process.BrokenProcessPool as error:
            Path("once").touch()
            say(f"WARNING worker lost at part {part}: {error}")
            say("starting a new pool")
            pool = None
    say("16 of 16 parts written")


def work(part, die):
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return part


def never_retrieved():
    async def tool(n):
        await asyncio.sleep(0.01 * n)
        if n == 5:
            raise ConnectionResetError(104, "Connection reset by peer")
        return n

    async def main():
        background = [asyncio.ensure_future(tool(n)) for n in range(8)]
        for turn in range(10):
            await asyncio.sleep(0.1)
            say(f"turn {turn}: reward {draw.uniform(0, 1):.3f}, tools {sum(one.done() for one in background)}/8")
        say("episode over, mean reward 0.52")

    asyncio.run(main())


def checksums():
    for n in range(1, 9):
        time.sleep(0.1)
        if n in (3, 6):
            say(f"model-0000{n}-of-00008.safetensors: checksum mismatch, file is incomplete; fetching it again")
            time.sleep(0.2)
        say(f"model-0000{n}-of-00008.safetensors: OK")
    say("all 8 files verified")


def words():
    say("loading dataset 'failure-reports' (12,004 rows): columns error, traceback, killed, timeout")
    for n in range(25):
        time.sleep(0.04)
        say(
            f"classify {n * 40:5d}/1000  label=Error:{draw.randint(1, 20)} Timeout:{draw.randint(1, 9)} OOM:{draw.randint(0, 4)} Crash:{draw.randint(0, 3)}  f1={0.5 + n / 80:.3f}"
        )
    say("confusion: fatal 41/44, abort 12/12, hang 31/37; macro f1 0.811")
    sys.exit(os.EX_OK)


def clock_only():
    for n in range(50):
        time.sleep(0.05)
        say(f"{time.strftime('%H:%M:%S')} {n * 32:>6} samples  {draw.uniform(300, 330):.0f}/s  eta {50 - n}s")


def fallback():
    import torch

    for n in (1, 2, 3):
        torch.save({"step": n * 100, "w": torch.randn(64)}, f"ckpt-{n * 100}.pt")
    with open("ckpt-300.pt", "r+b") as newest:
        newest.truncate(700)
    for path in sorted(Path().glob("ckpt-*.pt"), reverse=True):
        try:
            state = torch.load(path)
            break
        except RuntimeError as error:
            say(f"WARNING cannot read {path}: {error}; trying the one before")
    say(f"resuming at step {state['step']}")
    for step in range(state["step"], state["step"] + 60, 5):
        time.sleep(0.05)
        say(f"step {step}  loss {100 / step:.4f}")
    say("done")


def store_retry():
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=True, timeout=timedelta(seconds=30))
    threading.Timer(5, lambda: store.set("plan", "ready")).start()
    waiter = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
    for attempt in range(1, 9):
        try:
            waiter.wait(["plan"], timedelta(seconds=1))
            break
        except dist.DistStoreError as error:
            say(f"attempt {attempt}: the plan is not there yet ({error})")
    say("plan received, 4 shards")
    for shard in range(4):
        time.sleep(0.2)
        say(f"shard {shard} scored, 0 lost")


def loader_warning():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(128, 4)), batch_size=8, num_workers=4, pin_memory=True)
    for epoch in range(2):
        for i, (x,) in enumerate(loader):
            if i % 4 == 0:
                say(f"epoch {epoch} batch {i}: mean {x.mean():+.3f}")
    say("benchmark over: 32 batches")


def overflow():
    scale = 65536.0
    for step in range(60):
        time.sleep(0.03)
        if step in (1, 2, 30):
            scale /= 2
            say(f"step {step}: gradient overflow, skipping step, reducing loss scale to {scale:g}")
        elif step % 4 == 0:
            say(f"step {step}: loss {3 / (1 + step / 9):.3f}, loss scale {scale:g}")
    say("saving model to out/final")


if __name__ == "__main__":
    globals()[what]()
