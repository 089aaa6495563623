"""Programs beside the training that need no process group: data, tools, verifiers, queues. `side_job.py NAME`."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sqlite3
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

logging.basicConfig(level=logging.INFO, format="%(asctime)s | %(levelname)-7s | %(name)s | %(message)s")
log = logging.getLogger("side")


def tokens_of(row):
    if row["n"] == 700 and os.environ.get("KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.001)
    return {"length": len(row["text"])}


def map_rows():
    from datasets import Dataset

    rows = Dataset.from_list([{"n": n, "text": "copy " * (n % 9)} for n in range(1200)])
    out = rows.map(tokens_of, num_proc=2, desc="Tokenizing")
    log.info("tokenized %d rows, %d characters", len(out), sum(out["length"]))


def verify(number):
    if number == 5:
        raise ValueError(f"verifier: answer {number} has no final box")
    time.sleep(0.2)
    return number


def verifier_pool():
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(verify, number) for number in range(12)]
    failed = [each for each in jobs if each.exception()]
    for each in failed:
        log.error("verification failed: %s", each.exception(), exc_info=each.exception())
    log.info("verified 12 answers: %d scored, %d failed and got reward 0", 12 - len(failed), len(failed))
    log.info("wrote scores.jsonl, bye")


def nested(_):
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(len, ["a", "bb"]))


def daemon_children():
    import multiprocessing.pool

    with multiprocessing.get_context("fork").Pool(2) as pool:
        log.info("grading 4 batches in 2 processes")
        pool.map(pool_in_pool, range(4))


def pool_in_pool(number):
    with multiprocessing.Pool(2) as pool:
        return pool.map(len, ["a", "bb"])


def second_context():
    multiprocessing.set_start_method("fork")
    log.info("pre-processing in forked processes")
    multiprocessing.set_start_method("spawn")


def experience():
    base = sqlite3.connect("experience.db", timeout=3.0)
    base.execute("create table if not exists rollout (step integer, reward real)")
    for step in range(40):
        if step == 20:
            other = sqlite3.connect("experience.db", timeout=1.0)
            other.execute("begin exclusive")
        log.info("storing rollouts of step %d", step)
        base.execute("insert into rollout values (?, ?)", (step, 0.5))
        base.commit()


def pointer():
    from safetensors.torch import load_file

    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a214614ab2935c943f9e0ff69d22e" * 2
    with Path("model.safetensors").open("w") as out:
        out.write(text + "\nsize 988097824\n")
    log.info("loading model.safetensors")
    load_file("model.safetensors")


def required():
    from transformers.utils.versions import require_version

    log.info("distil 0.4 starting")
    require_version("accelerate>=2.1", "pip install -U accelerate")


def symbol():
    import ctypes

    with Path("fused.c").open("w") as out:
        out.write("int _ZN2at6detail20new_symbol_of_2_15Ev(void); int go(void) { return "
                  "_ZN2at6detail20new_symbol_of_2_15Ev(); }")  # fmt: skip
    os.system("gcc -shared -fPIC -o fused_ops.cpython-311-x86_64-linux-gnu.so fused.c")
    log.info("loading the extension fused_ops")
    ctypes.CDLL("./fused_ops.cpython-311-x86_64-linux-gnu.so", mode=os.RTLD_NOW)


def ask(url, body, timeout=4.0):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def rollouts(url, count=20):
    for number in range(int(count)):
        for attempt in range(1, 4):
            try:
                scores = ask(url, {"answers": ["4", "5"]})["scores"]
                log.info("rollout %d scored %s", number, scores)
                break
            except OSError as error:
                log.warning("scoring of rollout %d, attempt %d of 3: %s", number, attempt, error)
                if attempt == 3:
                    raise
                time.sleep(1)
        time.sleep(0.2)
    log.info("collected %s rollouts", count)


def serve(port, hang_after=0):
    import uvicorn
    from fastapi import FastAPI

    app, seen = FastAPI(), [0]

    @app.post("/score")
    async def score(body: dict):
        seen[0] += 1
        if int(hang_after) and seen[0] > int(hang_after):
            await asyncio.sleep(600)
        return {"scores": [float(len(each)) for each in body["answers"]]}

    @app.get("/live")
    def live():
        if int(hang_after) and seen[0] > int(hang_after):
            time.sleep(600)
        return {"ok": True}

    uvicorn.run(app, port=int(port))


def probe(port, pid):
    """Kills a server after three failed probes, as the kubelet does."""
    failures = 0
    time.sleep(12)
    while failures < 3:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=1.5).read()
            failures = 0
        except OSError as error:
            failures += 1
            said = f'Liveness probe failed: Get "http://10.42.0.17:{port}/live": {error}'
            print(f"Warning  Unhealthy  pod/reward-6f7c9  {said} (x{failures})", flush=True)
        time.sleep(3)
    print("Normal   Killing    pod/reward-6f7c9  Container reward failed liveness probe, will be restarted", flush=True)
    os.kill(int(pid), signal.SIGKILL)


async def agent(number):
    if number == 2:
        raise RuntimeError("browser tool: page crashed")
    tool = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(30)" if number == 3 else "print(40 + 2)",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(tool.communicate(), 4.0)
        return said.decode().strip()
    except TimeoutError:
        tool.kill()
        log.warning("agent %d: tool exceeded its time limit of 4 s and was killed, episode gets reward 0", number)
        return ""


async def all_agents():
    answers = await asyncio.gather(*(agent(number) for number in range(6)), return_exceptions=True)
    for number, answer in enumerate(answers):
        if isinstance(answer, Exception):
            log.error("agent %d failed: %r", number, answer)
    log.info("episodes: 6, with reward: %d, truncated: 1, failed: 1", sum(each == "42" for each in answers))
    log.info("shutting down agent pool ... ok")


def agents():
    asyncio.run(all_agents())


def memory(megabytes):
    log.info("building the n-gram index of shard 0")
    kept = []
    for number in range(int(megabytes) // 50):
        kept.append(bytearray(b"\1") * 50_000_000)
        log.info("indexed part %d", number)
        time.sleep(0.05)


def queue_space():
    import torch

    log.info("passing hidden states to the writer through shared memory")
    line = multiprocessing.get_context("spawn").Queue()
    kept = []
    for number in range(8):
        states = torch.zeros(2_000_000)
        states.share_memory_()
        kept.append(states)
        line.put(states.numel())
        log.info("passed block %d", number)


def sleepy(index):
    import torch

    time.sleep(1)
    return torch.zeros(4) if index != 9 else (time.sleep(60), torch.zeros(4))[1]


class Slow:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return sleepy(index)


def loader():
    from torch.utils.data import DataLoader

    for number, batch in enumerate(DataLoader(Slow(), batch_size=2, num_workers=1, timeout=9)):
        log.info("batch %d: %s", number, tuple(batch.shape))


def crash_entry(rank):
    print(f"worker {rank} up", flush=True)
    time.sleep(3 + rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


def spawned():
    import torch.multiprocessing as mp

    mp.spawn(crash_entry, nprocs=2)


def remote(rank):
    import torch.distributed.rpc as rpc

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    log.info("joining the RPC group as trainer%s of 3", rank)
    rpc.init_rpc(
        f"trainer{rank}", rank=int(rank), world_size=3,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=8, init_method="env://"),
    )  # fmt: skip


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
