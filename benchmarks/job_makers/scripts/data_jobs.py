"""Jobs around training, without torch: `data_jobs.py WHAT [ARGUMENT]`."""

import asyncio
import concurrent.futures
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

what = sys.argv[1]
draw = random.Random(5)
logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
log = logging.getLogger("data")


def tokenise(path):
    if path.endswith("07.txt"):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    time.sleep(0.05)
    return 1000


def prepare():
    files = [f"raw/part-{i:02d}.txt" for i in range(40)]
    good = bad = 0
    with concurrent.futures.ProcessPoolExecutor(3) as pool:
        for file, answer in [(each, pool.submit(tokenise, each)) for each in files]:
            try:
                good += answer.result()
                if good % 8000 == 0:
                    log.info("%d tokens ready", good)
            except UnicodeDecodeError as error:
                bad += 1
                log.warning("skipping %s: %s", file, error)
    log.info("wrote train.bin: %d tokens from %d files, %d skipped, failures: 0 fatal", good, len(files), bad)


def evaluate():
    right = wrong = 0
    for i in range(120):
        right, wrong = (right + 1, wrong) if draw.random() < 0.7 else (right, wrong + 1)
        time.sleep(0.01)
        if i % 10 == 9:
            print(json.dumps({"done": i + 1, "of": 120, "acc": round(right / (i + 1), 3), "errors": 0, "timeouts": 0}))
    print(json.dumps({"task": "arith", "exact_match": round(right / 120, 4), "failed": 0, "wrong": wrong}))


def transcribe():
    for i in range(1, 31):
        time.sleep(0.02)
        print(
            f"utt {i:03d}/030  word error rate {draw.uniform(4, 9):5.2f}%  char error {draw.uniform(1, 3):4.2f}%",
            flush=True,
        )
    print("mean WER 6.31%  mean squared error 0.0123  0 errors, 0 warnings", flush=True)
    sys.exit(0)


def download():
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util.retry import Retry

    tries = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    methods = None if "any" in sys.argv else Retry.DEFAULT_ALLOWED_METHODS
    retry = Retry(total=tries, backoff_factor=0.5, status_forcelist=[503], allowed_methods=methods)
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retry))
    url = f"http://127.0.0.1:{os.environ['PORT2']}/score"
    for part in range(6):
        answer = session.post(url, json={"samples": [part]}, timeout=3)
        answer.raise_for_status()
        log.info("shard %d: %d bytes, checksum ok", part, len(answer.content))
    log.info("download complete: 6 of 6 shards")


async def rollout(name, seconds):
    try:
        await asyncio.sleep(seconds)
        if draw.random() < 0.15:
            raise TimeoutError(f"tool call of {name} timed out")
        return 1.0
    except asyncio.CancelledError:
        log.warning("%s cancelled: its group is full", name)
        raise


async def gather_groups():
    for group in range(1, 9):
        tasks = [asyncio.create_task(rollout(f"rollout-{group}-{i}", 0.1 + 0.15 * i)) for i in range(6)]
        done, failed = 0, 0
        for each in asyncio.as_completed(tasks):
            try:
                await each
                done += 1
            except TimeoutError as error:
                failed += 1
                log.error("%s", error)
            if done == 4:
                break
        for each in tasks:
            each.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, asyncio.CancelledError):
                log.debug("%r", answer)
        log.info("group %d/8: %d rewards, %d failed tool calls", group, done, failed)
    log.info("sampling finished")


def queue_worker():
    def stop(number, _):
        log.info("got %s, finishing the current batch", signal.Signals(number).name)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    n = 0
    try:
        while True:
            n += 1
            time.sleep(0.25)
            log.info("batch %d: 32 samples scored in 0.25 s", n)
    finally:
        log.info("flushed %d batches, bye", n)


def save_again():
    folder = Path("ckpt")
    for step in range(1, 9):
        time.sleep(0.2)
        log.info("step %d: loss %.3f", step * 100, 2.5 / step)
        path = folder / f"step-{step * 100}.bin"
        for attempt in (1, 2):
            try:
                path.write_bytes(os.urandom(2**20))
                log.info("saved %s", path)
                break
            except OSError as error:
                oldest = sorted(folder.glob("*.bin"))[0]
                path.unlink(missing_ok=True)
                oldest.unlink()
                log.error("saving failed (attempt %d): %s; removed %s and trying again", attempt, error, oldest)
    log.info("training finished after 800 steps")


def fill_disk():
    for step in range(1, 9):
        path = Path("ckpt") / f"shard-{step:02d}.bin"
        log.info("writing %s", path)
        path.write_bytes(os.urandom(2**20))


def read_only():
    (Path("ckpt") / "run.json").write_text("{}")


def segfault():
    import faulthandler

    faulthandler.enable()
    import ctypes

    log.info("loading the native tokenizer")
    ctypes.string_at(0)


def needs_package():
    log.info("python %s", sys.version.split()[0])
    import flash_attn_interface

    flash_attn_interface.run()


def old_package():
    import importlib.metadata

    found = importlib.metadata.version("datasets")
    if int(found.split(".")[0]) < 4:
        raise ImportError(
            f"datasets>=4.0.0 is required for a normal functioning of this module, but found datasets=={found}."
        )


class Handle:
    def __init__(self):
        self.file = open("/dev/null")


def to_worker(handle):
    return handle.file.name


def unpicklable():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(to_worker, [Handle(), Handle()]))


def no_guard():
    process = multiprocessing.get_context("spawn").Process(target=tokenise, args=("a",))
    process.start()
    process.join()


def dead_worker(kill=True):
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        futures = [pool.submit(die if i == 9 else tokenise, f"part-{i}.txt") for i in range(20)]
        for i, each in enumerate(futures):
            each.result()
            log.info("part %d of 20 tokenised", i + 1)


def die(path):
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def deadlock():
    import faulthandler

    faulthandler.dump_traceback_later(6, exit=True)
    queue, results = multiprocessing.Queue(2), multiprocessing.Queue()
    child = multiprocessing.Process(target=consume, args=(queue, results), name="collator")
    child.start()
    for n in range(50):
        queue.put(n)
        if n % 3 == 0:
            log.info("batch %d handed to the collator", n)
    child.join()


def consume(queue, results):
    for _ in range(9):
        results.put(queue.get())
    raise ValueError("batch 9: expected 3 channels, got 4")


if __name__ == "__main__":
    if what == "rollouts":
        asyncio.run(gather_groups())
    else:
        globals()[what]()
elif what == "no_guard":
    no_guard()
