"""A learner with rollout processes and reward servers (plain processes, HTTP), and small programs beside a training."""

import http.server
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(processName)s] %(levelname)s %(message)s")
log = logging.getLogger("course")
TEMPLATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
)


def reward_server(number, port, broken_from, broken_for):
    """Scores answers; from one request on it answers 500 for a while."""
    seen = [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            seen[0] += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            bad = broken_from <= seen[0] < broken_from + broken_for
            self.send_response(500 if bad else 200)
            self.end_headers()
            self.wfile.write(b'{"error": "CUDA worker pool is empty"}' if bad else b'{"score": 0.5}')

        def log_message(self, *_):
            pass

    log.info(f"reward-{number} listens on 127.0.0.1:{port}")
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def ask(number, port, answer):
    """Asks a reward server, four times at most."""
    for attempt in range(1, 5):
        try:
            body = json.dumps({"answer": answer}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/score", body, timeout=5) as got:
                return json.load(got)["score"]
        except urllib.error.URLError as error:
            log.warning(f"reward-{number} (127.0.0.1:{port}) attempt {attempt}/4: {error}")
            if attempt == 4:
                raise
            time.sleep(0.2 * 2**attempt)
    return 0.0


def rollouts(number, inbox, outbox, fault):
    for turn in iter(inbox.get, None):
        if fault == "kill" and number == 1 and turn == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stuck" and number == 2 and turn == 5:
            log.info("environment webshop-17 is being reset")
            threading.Event().wait()
        if fault == "slow-reset" and number == 2 and turn == 5:
            log.warning("environment webshop-17 needs long for its reset")
            time.sleep(9)
        time.sleep(random.random() * 0.2)
        outbox.put((number, turn, "42"))


def course(fault, steps=14):
    """Learner, three rollout processes, two reward servers."""
    base = 20000 + os.getpid() % 9000
    forever = 10**6 if fault == "500" else 3
    servers = [
        multiprocessing.Process(
            target=reward_server,
            args=(n, base + n, 9 if fault in ("500", "500-once") and n == 1 else 10**6, forever),
            name=f"reward-{n}",
            daemon=True,
        )
        for n in range(2)
    ]
    outbox = multiprocessing.Queue()
    inboxes = [multiprocessing.Queue() for _ in range(3)]
    workers = [
        multiprocessing.Process(target=rollouts, args=(n, box, outbox, fault), name=f"rollout-{n}", daemon=True)
        for n, box in enumerate(inboxes)
    ]
    for each in (*servers, *workers):
        each.start()
    time.sleep(1.5)
    for step in range(1, steps + 1):
        for box in inboxes:
            box.put(step)
        scores, missing = [], {0, 1, 2}
        waited = time.monotonic()
        while missing:
            try:
                number, _, answer = outbox.get(timeout=3)
                missing.discard(number)
                scores.append(ask(number % 2, base + number % 2, answer))
            except multiprocessing.queues.Empty:
                for n in sorted(missing):
                    if workers[n].exitcode is not None:
                        text = f"rollout-{n} (pid {workers[n].pid}) is gone, exit code {workers[n].exitcode}"
                        raise RuntimeError(text) from None
                names = ", ".join(f"rollout-{n}" for n in sorted(missing))
                log.warning(f"step {step}: still waiting for {names} after {time.monotonic() - waited:.0f} s")
                if time.monotonic() - waited > 24:
                    raise TimeoutError(f"step {step}: no trajectory from {names} within 24 s") from None
        log.info(
            f"step {step}/{steps} reward {sum(scores) / 3:.3f} kl {0.002 * step:.4f} entropy {2.1 - 0.02 * step:.3f}"
        )
    for box in inboxes:
        box.put(None)
    log.info("course finished, policy written to policy-14.json")


def templated(fault):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokens = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")))
    tokens.chat_template = TEMPLATE
    for shard in range(4):
        for row in range(200):
            messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
            if fault == "roles" and shard == 2 and row == 117:
                messages.insert(0, {"role": "system", "content": "be brief"})
                messages.insert(1, {"role": "assistant", "content": "ok"})
            tokens.apply_chat_template(messages, tokenize=False)
        log.info(f"shard {shard}: 200 conversations rendered")


def packed(fault):
    """Tokenises with a pool; one of its processes dies or has too few file descriptors."""
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, count in enumerate(pool.map(pack_one, range(12), [fault] * 12)):
            log.info(f"part {number}: {count} sequences")


def pack_one(part, fault):
    time.sleep(0.2)
    if fault == "dies" and part == 7:
        os._exit(9)
    return 512 - part


def watched(fault):
    """A checkpoint watcher that evaluates what appears."""
    folder = Path("ckpt")
    folder.mkdir()
    for n in range(1, 5):
        (folder / f"step-{n * 100}").mkdir()
        time.sleep(0.4)
        log.info(f"evaluating ckpt/step-{n * 100}: accuracy {0.4 + 0.05 * n:.3f} (0 errors in 250 tasks)")
        if n == 2:
            log.warning("ckpt/step-200 was removed while it was read (FileNotFoundError), skipped")
    log.info("no new checkpoint for 1 s and training.done exists, leaving")


def main():
    mode, fault = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    {"course": course, "templated": templated, "packed": packed, "watched": watched}[mode](fault)


if __name__ == "__main__":
    main()
