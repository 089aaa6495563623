"""A client of a vLLM server: waits until it is up and asks for completions."""

import argparse
import json
import logging
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s client: %(message)s", stream=sys.stdout)
log = logging.getLogger("client")


def call(url, body=None, timeout=30.0):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"{}")


def wait_until_up(url, seconds, server):
    began = time.monotonic()
    while time.monotonic() - began < seconds and (not server or Path(f"/proc/{server}").exists()):
        try:
            call(f"{url}/health", timeout=5)
            log.info("server is up after %.0f s", time.monotonic() - began)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            log.warning("server not ready yet: %s, trying again in 5 s", error)
            time.sleep(5)
    raise TimeoutError(f"{url} did not come up in {seconds} s")


def main():
    options = argparse.ArgumentParser()
    for name, default in {
        "port": 8000,
        "requests": 6,
        "long_every": 0,
        "stop": 0,
        "kill": 0,
        "freeze_at": -1,
        "kill_at": -1,
        "wait": 400,
    }.items():
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--timeout", type=float, default=30.0)
    args = options.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    wait_until_up(url, args.wait, args.kill)
    model = call(f"{url}/v1/models")["data"][0]["id"]
    for number in range(args.requests):
        for at, what in ((args.freeze_at, signal.SIGSTOP), (args.kill_at, signal.SIGKILL)):
            if number == at:
                for pid in engines(args.kill):
                    os.kill(pid, what)
        prompt = "12+34=" * (40 if args.long_every and number % args.long_every == args.long_every - 1 else 1)
        began = time.monotonic()
        try:
            answer = call(f"{url}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 16}, args.timeout)
            log.info(
                "request %d: %d tokens in %.2f s",
                number,
                answer["usage"]["completion_tokens"],
                time.monotonic() - began,
            )
        except urllib.error.HTTPError as error:
            log.warning("request %d skipped: HTTP %d %s", number, error.code, error.read().decode()[:300])
            if error.code >= 500:
                raise
        time.sleep(0.5)
    log.info("all requests done")


def engines(parent):
    """The engine processes below a server."""
    found, todo = [], [parent]
    while todo:
        place = Path("/proc") / str(todo[0])
        todo += [int(each) for each in (place / "task" / str(todo[0]) / "children").read_text().split()]
        found += [todo[0]] if "EngineCor" in (place / "comm").read_text() else []
        todo.pop(0)
    return found


if __name__ == "__main__":
    main()
