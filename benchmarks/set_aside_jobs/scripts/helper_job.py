"""Programs beside a training: data preparation, judges, sandboxes, environments. `helper_job.py MODE [options]`."""

import argparse
import io
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

random.seed(11)


def documents(count):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "it", "was", "good", "for", "us"]
    return [" ".join(random.choices(words, k=20 + n % 50)) for n in range(count)]


def encode(text):
    time.sleep(0.01)
    return [sum(map(ord, word)) % 500 for word in text.split()]


def tokenize(options):
    """Rich lines, a pool, some documents skipped."""
    from rich.console import Console
    from rich.logging import RichHandler

    logging.basicConfig(
        level=logging.INFO, format="%(message)s", datefmt="[%X]", handlers=[RichHandler(console=Console(width=110))]
    )
    log = logging.getLogger("tok")
    texts = documents(600)
    log.info("tokenizing %d documents with 2 workers into shards/", len(texts))
    Path("shards").mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for number in range(6):
            rows = pool.map(encode, texts[100 * number : 100 * number + 100])
            skipped = [n for n, row in enumerate(rows) if len(row) > 64]
            if skipped:
                log.warning(
                    "shard %d: %d documents longer than 64 tokens were cut (first: %d)",
                    number,
                    len(skipped),
                    skipped[0],
                )
            if number == 3:
                log.error("doc 317: invalid UTF-8 (b'\\xc3(' at 112), replaced by U+FFFD")
            Path(f"shards/{number:05d}.json").write_text(json.dumps(rows))
            log.info("wrote shards/%05d.json: %d tokens", number, sum(map(len, rows)))
    log.info("done, 0 failed shards")


class Judge(BaseHTTPRequestHandler):
    """Scores, and answers 429 as often as it is set to."""

    refuse = 0.4

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        code = 429 if random.random() < self.refuse else 200
        body = (
            b'{"error": {"type": "rate_limit_exceeded", "message": "Rate limit reached for judge-32b"}}'
            if code == 429
            else b'{"score": 0.5}'
        )
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def judge(options):
    """Loguru lines; a judge that limits its callers, for a while or always."""
    from loguru import logger

    Judge.refuse = 1.0 if options.fault == "limited" else 0.4
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def score(sample):
        for attempt in range(6):
            try:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{options.port}/v1/judge", json.dumps(sample).encode()
                )
                return json.loads(urllib.request.urlopen(request, timeout=5).read())["score"]
            except urllib.error.HTTPError as error:
                if attempt == 5:
                    raise
                wait = 0.2 * 2**attempt
                logger.warning(
                    "judge answered {} {}, attempt {}/6, next in {:.1f}s", error.code, error.reason, attempt + 1, wait
                )
                time.sleep(wait)
        return None

    logger.info("scoring 24 rollouts of step 310")
    if options.fault == "limited":
        scores = [score({"id": n}) for n in range(24)]
    else:
        scores = []
        for number in range(24):
            try:
                scores.append(score({"id": number}))
            except urllib.error.HTTPError:
                logger.exception("rollout {} was not scored, it is dropped from the group", number)
    logger.success("mean score {:.2f} of {} rollouts", sum(scores) / len(scores), len(scores))


CANDIDATES = (
    "print(sum(range(10)))", "while True: pass", "print(int('four'))", "import numpy_financial\nprint(1)", "print(45)",
    "def f(n): return f(n + 1)\nf(0)", "print(open('/data/answers.txt').read())", "print(45)", "x = [0] * 10**11",
)  # fmt: skip


def sandbox(options):
    """Runs programs that a policy wrote; that many of them fail is what it is for."""
    right = 0
    for number, code in enumerate(CANDIDATES):
        try:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3)
            right += done.stdout.strip() == "45"
            print(f"[exec {number}] exit={done.returncode} passed={done.stdout.strip() == '45'}")
            if done.stderr:
                print("\n".join(f"[exec {number}]   {line}" for line in done.stderr.splitlines()[-6:]))
        except subprocess.TimeoutExpired:
            print(f"[exec {number}] timeout after 3s, killed, reward 0")
    print(f"[exec] batch done: {right}/{len(CANDIDATES)} passed, mean reward {right / len(CANDIDATES):.3f}")


def step_environment(pipe, name, fault):
    state = 0
    while True:
        action = pipe.recv()
        if action is None:
            return
        state += action
        if fault and state > 6:
            grid = {n: n for n in range(5)}
            print(f"[{name}] agent at {state}", flush=True)
            grid[state]
        pipe.send((state, float(state == 5)))


def environments(options):
    """Four environment processes; one may raise."""
    context = multiprocessing.get_context("spawn")
    pairs = []
    for number in range(4):
        here, there = context.Pipe()
        name = f"env-{number}"
        process = context.Process(
            target=step_environment, name=name, args=(there, name, options.fault == "grid" and number == 2)
        )
        process.start()
        there.close()
        pairs.append((here, process))
    print("vec_env: 4 environments up", flush=True)
    for step in range(14):
        for here, _ in pairs:
            here.send(1)
        rewards = [here.recv()[1] for here, _ in pairs]
        print(f"vec_env: step {step} reward {sum(rewards):.1f}", flush=True)
    for here, process in pairs:
        here.send(None)
        process.join()
    print("vec_env: closed")


def archive(options):
    """Reads shards (tar); one may be cut."""
    for number in range(3):
        with tarfile.open(f"shard-{number:06d}.tar", "w") as out:
            for row in range(40):
                data = os.urandom(300)
                info = tarfile.TarInfo(f"{number:03d}{row:04d}.jpg")
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))
    if options.fault == "cut":
        os.truncate("shard-000001.tar", 9000)
    for number in range(3):
        kept = 0
        with tarfile.open(f"shard-{number:06d}.tar") as shard:
            for member in shard:
                shard.extractfile(member).read()
                kept += 1
        print(json.dumps({"event": "shard_indexed", "shard": number, "samples": kept}), flush=True)


def spawn(options):
    """A reward that is no top-level function, for processes that are spawned."""
    scale = 2.0
    scorer = lambda text: len(text) / scale  # noqa: E731
    context = multiprocessing.get_context("spawn")
    print("starting 2 reward workers")
    process = context.Process(target=scorer, args=("abc",))
    process.start()
    process.join()


def grow(text):
    return [text * 50_000_000]


def memory(options):
    """A pool under a limit of address space."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    print("packing: 4 workers, limit of the step is 6 GiB of address space", flush=True)
    kept = []
    for number, text in enumerate(documents(400)):
        kept.append(grow(text))
        if number % 2 == 0:
            print(f"packing: sequence {number} has {len(kept[-1][0]):,} characters", flush=True)


def evaluate(options):
    """An evaluation harness: tasks, some answers not parsed, a table."""
    for task, count in (("gsm8k_mini", 30), ("arc_mini", 25), ("mbpp_mini", 12)):
        failures = 0
        for row in range(count):
            time.sleep(0.02)
            if row % 11 == 7:
                failures += 1
                print(
                    f"WARNING:lm_eval:{task}[{row}]: no answer found in the output, counted as wrong", file=sys.stderr
                )
        if task == "mbpp_mini":
            print("ERROR:lm_eval:mbpp_mini: 3 programs timed out (this is reported as fail@1)", file=sys.stderr)
        print(f"|{task:<12}|Version:1|n-shot: 4|exact_match|{1 - failures / count:.4f}|± 0.0213|", flush=True)
    print("evaluation finished: results/eval_2310.json")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "mode", choices=("tokenize", "judge", "sandbox", "environments", "archive", "spawn", "memory", "evaluate")
    )
    parser.add_argument("--fault", default="")
    parser.add_argument("--port", type=int, default=28801)
    options = parser.parse_args()
    globals()[options.mode](options)


if __name__ == "__main__":
    main()
