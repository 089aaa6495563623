"""A training with services beside it, each a process of this script: `crew.py MODE [--form F] [--files]`."""

import http.server
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MODE = sys.argv[1]
FORM = sys.argv[sys.argv.index("--form") + 1] if "--form" in sys.argv else "plain"
ROLE = os.environ.get("CREW_ROLE", "learner")
SERVICES = ("prompt-feeder", "sampler-0", "sampler-1", "sampler-2", "reward-api", "code-runner", "kv-store", "board")
STEPS = 8


class Lines(logging.Formatter):
    def format(self, record):
        text, level = record.getMessage(), record.levelname
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if FORM == "json":
            return json.dumps({"timestamp": now, "severity": level, "service": ROLE, "message": text})
        if FORM == "logfmt":
            return f"ts={now} level={level.lower()} svc={ROLE} " + (text if "=" in text else f'msg="{text}"')
        if FORM == "journal":
            day = time.strftime("%b %d %H:%M:%S", time.gmtime(record.created))
            return f"{day} rl-box {ROLE}[{os.getpid()}]: {text}"
        return f"{now} {level:<7} {text}"


log = logging.getLogger("crew")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Lines())
log.addHandler(handler)
log.setLevel(logging.INFO)


def port(role):
    return int(os.environ["CREW_PORT"]) + SERVICES.index(role)


def call(role, path, body=None, timeout=6.0):
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port(role)}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def ask(role, path, body=None, tries=3, timeout=6.0):
    for attempt in range(1, tries + 1):
        try:
            return call(role, path, body, timeout)
        except (urllib.error.URLError, OSError) as error:
            if attempt == tries:
                log.error(f"{role} (127.0.0.1:{port(role)}{path}): giving up after {tries} attempts: {error}")
                raise
            log.warning(f"{role} 127.0.0.1:{port(role)}{path} attempt {attempt}/{tries} failed: {error}; again in 1 s")
            time.sleep(1.0)
    raise AssertionError(tries)


def serve(answers):
    """Serves JSON on the port of this role: a function of path and body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            try:
                code, reply = 200, answers(self.path, body)
            except Exception:
                log.exception(f"POST {self.path} failed")
                code, reply = 500, {"error": "internal"}
            raw = json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *given):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port(ROLE)), Handler)
    log.info(f"{ROLE} listens on 127.0.0.1:{port(ROLE)}")
    server.serve_forever()


def feeder():
    rows = [json.dumps({"id": n, "prompt": f"{n}+{n}=", "answer": 2 * n}) for n in range(64)]
    if MODE == "feeder-cut":
        rows[20] = rows[20][:17]
    Path("prompts.jsonl").write_text("\n".join(rows) + "\n")

    def answers(path, body):
        lines = Path("prompts.jsonl").read_text().splitlines()[body["from"] : body["from"] + 6]
        return [json.loads(line) for line in lines]

    serve(answers)


def sampler(number):
    weights = {"version": 0, "rows": 16 if not (MODE == "sampler-shape" and number == 1) else 12}
    if MODE == "warmup" and number == 1:
        for part in range(1, 5):
            log.info(f"compiling decode graphs {part}/4 (cold cache, this can take minutes)")
            time.sleep(3.0)

    def answers(path, body):
        if path == "/weights":
            if body["rows"] != weights["rows"]:
                raise ValueError(
                    f"weight update {body['version']} refused: lm_head.weight has {body['rows']} rows, "
                    f"this engine holds {weights['rows']}"
                )
            weights["version"] = body["version"]
            log.info(f"weights updated to version {body['version']} in {random.uniform(0.1, 0.3):.2f} s")
            return {"version": weights["version"]}
        step = body["step"]
        if step == 4 and MODE == "sampler-raises" and number == 2:
            raise IndexError(f"token id 50260 is beyond the vocabulary of 50257 (request req-{step}-3)")
        if step == 4 and MODE == "sampler-stuck" and number == 0:
            log.info(f"req-{step}: waiting for a free KV block (0 of 128 free)")
            time.sleep(300)
        if step == 4 and MODE == "sampler-killed" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 4 and MODE == "sampler-segv" and number == 2:
            __import__("ctypes").string_at(0)
        time.sleep(0.1)
        return [row["answer"] + random.choice((0, 0, 1)) for row in body["rows"]]

    serve(answers)


def judge():
    import uvicorn
    from fastapi import FastAPI, HTTPException

    if MODE == "judge-settings":
        settings = {"rubric": "exact", "scale": "ten"}
        scale = float(settings["scale"]) if settings["scale"].isdigit() else None
        if scale is None:
            log.error(f"invalid settings in reward.yaml: scale must be a number, got {settings['scale']!r}")
            sys.exit(2)
    app, calls = FastAPI(), [0]

    @app.post("/score")
    def score(body: dict):
        calls[0] += 1
        if MODE == "judge-503-once" and calls[0] in (3, 4):
            raise HTTPException(503, "model is loading")
        if MODE == "judge-503" and calls[0] > 4:
            raise HTTPException(503, "upstream overloaded")
        if MODE == "judge-hangs" and calls[0] > 4:
            time.sleep(300)
        if MODE == "judge-key" and calls[0] == 5:
            return {"scores": [{"exact": 1.0}[body["rubric"]] for _ in body["rows"]]}
        return {"scores": [float(row["answer"] == text) for row, text in zip(body["rows"], body["texts"], strict=True)]}

    uvicorn.run(app, host="127.0.0.1", port=port(ROLE), log_level="info")


def runner():
    if MODE == "runner-files":
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    kept = []

    def answers(path, body):
        if MODE == "runner-files" and body["step"] >= 3:
            kept.extend(Path(os.devnull).open() for _ in range(8))  # noqa: SIM115
        program = f"print({body['step']} + 1)"
        if MODE == "runner-slow" and body["step"] % 3 == 1:
            program = "while True: pass"
        try:
            done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=2)
        except subprocess.TimeoutExpired:
            log.warning(f"program of rollout {body['step']} ran over 2 s and was stopped, it scores 0")
            return {"passed": False}
        return {"passed": done.returncode == 0}

    serve(answers)


def store():
    kept = {}

    def answers(path, body):
        kept.update(body)
        return kept

    serve(answers)


def board():
    log.info("board refreshes every 2 s")
    for turn in range(400):
        time.sleep(2.0)
        if MODE == "board-crashes" and turn == 1:
            raise RuntimeError("board: template 'curves.html' not found")
        log.info(f"board refreshed ({turn + 1})")


def supervise(workers):
    """Reports the end of services as a container runtime would."""
    while True:
        for role, worker in list(workers.items()):
            code = worker.poll()
            if code is not None:
                del workers[role]
                words = (
                    f"killed by signal {-code} ({signal.Signals(-code).name})"
                    if code < 0
                    else f"exited with code {code}"
                )
                print(f"{role} {words}", flush=True)
        time.sleep(0.2)


def pump(role, worker, out):
    for raw in worker.stdout:
        text = raw.decode("utf-8", "replace").rstrip("\n")
        if out:
            with (Path(out) / f"{role}.log").open("a") as file:
                file.write(text + "\n")
        else:
            print(f"{role:<14}| {text}" if FORM == "plain" else text, flush=True)


def start():
    base = random.randint(21000, 29000)
    os.environ["CREW_PORT"] = str(base)
    if MODE == "store-port":
        taken = socket.create_server(("127.0.0.1", port("kv-store")))
        globals()["_taken"] = taken
    workers, out = {}, os.environ["OUT"] if "--files" in sys.argv else ""
    for role in SERVICES:
        command = [sys.executable, "crew.py", *sys.argv[1:]]
        env = os.environ | {"CREW_ROLE": role}
        worker = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        workers[role] = worker
        threading.Thread(target=pump, args=(role, worker, out), daemon=True).start()
    threading.Thread(target=supervise, args=(dict(workers),), daemon=True).start()
    for role in SERVICES[:-1]:
        for _ in range(60):
            try:
                socket.create_connection(("127.0.0.1", port(role)), timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            log.error(f"{role} did not open 127.0.0.1:{port(role)} within 30 s")
            raise TimeoutError(f"{role} is not ready")
        if MODE == "store-port" and role == "kv-store":
            time.sleep(1)
            if workers[role].poll() is not None:
                raise RuntimeError("kv-store exited during the start")
    log.info("all services are ready")
    return workers


def learner():
    workers, first = start(), 0
    if Path("state.json").exists():
        first = json.loads(Path("state.json").read_text())["step"]
        log.info(f"resumed from state.json at step {first}")

    def stopped(number, frame):
        log.warning(f"received {signal.Signals(number).name} (preemption notice), saving before the end")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stopped)
    step = first
    try:
        for step in range(first, STEPS):
            rows = ask("prompt-feeder", "/next", {"from": 6 * step})
            texts = []
            for number in range(3):
                wait = 9.0 if MODE == "sampler-stuck" else 20.0
                texts += ask(
                    f"sampler-{number}", "/sample", {"step": step, "rows": rows[2 * number : 2 * number + 2]}, 2, wait
                )
            rubric = "helpful" if MODE == "judge-key" and step == 4 else "exact"
            scores = ask("reward-api", "/score", {"rows": rows, "texts": texts, "rubric": rubric})["scores"]
            passed = ask("code-runner", "/run", {"step": step})["passed"]
            mean = sum(scores) / len(scores)
            if MODE == "spread-zero" and step == 4:
                mean = float("inf") - float("inf")
            if mean != mean:
                raise FloatingPointError(f"advantages of step {step} are nan: the rewards of a group have no spread")
            ask("kv-store", "/set", {"step": step, "reward": mean})
            for number in range(3):
                ask(f"sampler-{number}", "/weights", {"version": step + 1, "rows": 16}, 2)
            log.info(f"step={step} reward={mean:.3f} passed={passed} samples={len(texts)}")
            if MODE == "preempted" and step == 3 and first == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        log.info(f"training complete after {STEPS} steps")
    finally:
        Path("state.json").write_text(json.dumps({"step": step + 1}))
        log.info("stopping the services")
        for worker in workers.values():
            worker.terminate()
        time.sleep(1.0)


if __name__ == "__main__":
    parts = {"prompt-feeder": feeder, "reward-api": judge, "code-runner": runner, "kv-store": store, "board": board}
    if ROLE.startswith("sampler"):
        sampler(int(ROLE[-1]))
    else:
        parts.get(ROLE, learner)()
