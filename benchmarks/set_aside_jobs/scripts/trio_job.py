"""A sampler, a grader and a trainer of an RL run, each a process: `trio_job.py ROLE --base PORT [--fault X] ...`."""

import argparse
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("role", choices=("sampler", "grader", "trainer"))
for name, kind, value in (
    ("base", int, 0), ("fault", str, ""), ("steps", int, 24), ("at", int, 6), ("samplers", int, 2), ("index", int, 0),
    ("wait", float, 4), ("tries", int, 4),
):  # fmt: skip
    OPTIONS.add_argument(f"--{name}", type=kind, default=value)
A = OPTIONS.parse_args()
NAME = A.role if A.role != "sampler" else f"sampler-{A.index}"
FORMS = {
    "trainer": "%(asctime)s trainer[%(process)d] %(levelname)s: %(message)s",
    "sampler": f"{{{NAME}}} %(levelname).1s %(asctime)s %(message)s",
    "grader": "%(asctime)s | grader | %(levelname)-5s | %(message)s",
}
logging.basicConfig(level=logging.INFO, format=FORMS[A.role], stream=sys.stdout)
LOG = logging.getLogger(NAME)
WIDTH = 16


def post(port, path, body, wait=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=wait or A.wait) as reply:
        return json.load(reply)


class Service(BaseHTTPRequestHandler):
    seen = 0
    version = 0
    lock = threading.Lock()

    def do_GET(self):
        self.answer(200, {"ok": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            type(self).seen += 1
        try:
            self.answer(200, getattr(self, self.path.strip("/"))(body))
        except PermissionError as error:
            self.answer(429, {"error": str(error)})
        except ValueError as error:
            LOG.exception("cannot handle %s", self.path)
            self.answer(500, {"error": str(error)})

    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def generate(self, body):
        if A.fault == "sampler-dies" and A.index == 1 and body["step"] == A.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if A.fault == "sampler-stuck" and A.index == 0 and body["step"] == A.at:
            LOG.info("prefill of 1 prompt with 131072 tokens")
            time.sleep(300)
        if A.fault == "sampler-slow" and body["step"] == A.at:
            time.sleep(6)
        texts = ["".join(random.choice("0123456789+= ") for _ in range(24)) for _ in range(body["n"])]
        LOG.info("step %d: %d completions, weights v%d", body["step"], len(texts), Service.version)
        return {"texts": texts, "version": Service.version}

    def weights(self, body):
        if len(body["tensor"]) != WIDTH and body["version"]:
            raise ValueError(f"lm_head.weight: expected {WIDTH} values, received {len(body['tensor'])}")
        Service.version = body["version"]
        LOG.info("weights v%d loaded in %.3fs", body["version"], 0.02)
        return {"version": Service.version}

    def score(self, body):
        if A.fault == "grader-limits" and self.seen in (5, 6, 9):
            raise PermissionError("rate limit of 60 requests per minute reached")
        if A.fault == "grader-hangs" and self.seen > A.at:
            time.sleep(300)
        if A.fault == "grader-template" and self.seen == A.at:
            return {"scores": "n/a"}
        if A.fault == "grader-broken" and self.seen >= A.at:
            raise ValueError("unknown rubric 'strict-v3'")
        return {"scores": [text.count("=") / 4 for text in body["texts"]]}

    def log_message(self, form, *values):
        if A.role == "sampler":
            LOG.info('"%s" %s', values[0], values[1])


def serve():
    port = A.base + (1 + A.index if A.role == "sampler" else 0)
    server = ThreadingHTTPServer(("127.0.0.1", port), Service)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    LOG.info("listening on 127.0.0.1:%d", port)
    server.serve_forever()
    LOG.info("drained, bye")


def again(what, call):
    for attempt in range(1, A.tries + 1):
        try:
            return call()
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            LOG.warning("%s failed, attempt %d of %d: %r", what, attempt, A.tries, error)
            if attempt == A.tries:
                raise
            time.sleep(0.6)
    return None


def wait_for(port, what):
    for _ in range(40):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return LOG.info("%s is up", what)
        except (urllib.error.URLError, ConnectionError) as error:
            LOG.info("%s not up yet (%s)", what, getattr(error, "reason", error))
            time.sleep(0.7)
    raise TimeoutError(f"{what} on port {port} did not come up")


def train():
    wait_for(A.base, "grader")
    for index in range(A.samplers):
        wait_for(A.base + 1 + index, f"sampler-{index}")
    tensor = [0.0] * WIDTH
    for step in range(A.steps):
        texts = []
        for index in range(A.samplers):
            port = A.base + 1 + index
            body = {"step": step, "n": 4}
            texts += again(f"sampler-{index} /generate", lambda p=port, b=body: post(p, "/generate", b))["texts"]
        scores = again("grader /score", lambda t=texts: post(A.base, "/score", {"texts": t}))["scores"]
        reward = sum(scores) / len(scores)
        tensor = [value + 0.01 * reward for value in tensor]
        LOG.info("step %d reward %.3f tokens %d", step, reward, sum(map(len, texts)))
        sent = tensor + [0.0] * 2 if A.fault == "wide-weights" and step == A.at else tensor
        for index in range(A.samplers):
            body = {"version": step + 1, "tensor": sent}
            port = A.base + 1 + index
            again(f"sampler-{index} /weights", lambda p=port, b=body: post(p, "/weights", b))
        if A.fault == "trainer-cut" and step == A.at:
            LOG.info("SIGTERM from the scheduler, saving before the end")
            return
        time.sleep(0.15)
    LOG.info("finished %d steps", A.steps)


if __name__ == "__main__":
    train() if A.role == "trainer" else serve()
