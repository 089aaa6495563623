"""A distillation of a small network by two ranks over gloo, with one of many faults."""

import argparse
import datetime
import faulthandler
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Lines(logging.Formatter):
    def format(self, record):
        return json.dumps(
            {
                "ts": round(record.created, 3),
                "lvl": record.levelname.lower(),
                "rank": RANK,
                "event": record.getMessage(),
            }
        )


FORMS = {
    "json": Lines(),
    "plain": logging.Formatter("%(asctime)s.%(msecs)03d [%(levelname).1s] distill: %(message)s", "%m/%d %H:%M:%S"),
    "rank": logging.Formatter(f"[rank {RANK}/{WORLD}] %(asctime)s %(levelname)s %(message)s", "%H:%M:%S"),
    "short": logging.Formatter(f"<{RANK}> %(message)s"),
}
log = logging.getLogger("distill")


def reward_by_length(lengths):
    return [1.0 / (length - sum(lengths) / len(lengths)) for length in lengths]


def depth_of(answer):
    return 1 + depth_of(answer[0]) if answer else 0


def at_step(options, step, torch, dist):
    """What goes wrong at the step of the fault on the rank of the fault."""
    fault = options.fault
    if fault == "length-reward":
        reward_by_length([12, 12, 12, 12])
    if fault == "nested-answer":
        answer = []
        for _ in range(5000):
            answer = [answer]
        depth_of(answer)
    if fault == "array":
        import numpy

        numpy.zeros((options.rows, 50257), numpy.float32)
    if fault == "tensor":
        torch.empty(options.rows, 4096)
    if fault == "regex":
        log.debug("format reward: matching 1 answer")
        re.match(r"^(<think>(\w+\s?)*</think>)$", "<think>" + "so we add the two of them " * 3 + "!")
    if fault == "read":
        log.info("asking the verifier for the scores of batch %d", step)
        peer = socket.socketpair()
        peer[0].recv(1024)
    if fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        faulthandler.dump_traceback_later(20, exit=False)
        with lock:
            pass
    if fault == "leave":
        log.info("sampler is exhausted after %d batches, leaving", step)
        os._exit(0)
    if fault == "import":
        import fused_rope_kernels  # noqa: F401
    if fault == "abort":
        os.abort()
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "shape":
        dist.all_reduce(torch.zeros(65))
        dist.all_reduce(torch.zeros(65))
    if fault == "other-call":
        dist.all_gather_into_tensor(torch.zeros(2 * WORLD), torch.zeros(2))
    if fault == "slow":
        time.sleep(options.seconds)
    if fault == "open-files":
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        options.kept = [socket.socket() for _ in range(80)]
    if fault == "huge-file":
        with Path("teacher_logits.bin").open("wb") as out:
            for _ in range(80):
                out.write(b"\0" * 1_000_000)
    if fault == "name":
        Path("samples-" + "x" * 300 + ".jsonl").write_text("{}")
    if fault == "links":
        Path("latest").symlink_to("latest")
        Path("latest/meta.json").read_text()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--fault", default="")
    options.add_argument("--on", type=int, default=1)
    options.add_argument("--at", type=int, default=12)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--rows", type=int, default=40_000_000_000)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--timeout", type=float, default=25.0)
    options.add_argument("--sleep", type=float, default=0.2)
    options.add_argument("--form", default="plain")
    options.add_argument("--monitored", action="store_true")
    options.add_argument("--save_on_term", action="store_true")
    options.add_argument("--device", default="cpu")
    options.add_argument("--vocab", type=int, default=400)
    options.add_argument("--load", default="")
    options.add_argument("--save", default="")
    options.add_argument("--noise", action="store_true")
    options.add_argument("--width", type=int, default=48)
    options.add_argument("--lr", type=float, default=0.05)
    options = options.parse_args()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(FORMS[options.form])
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    asked = []
    if options.save_on_term:
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    if options.fault == "import-first" and options.on == RANK:
        import fused_rope_kernels  # noqa: F401
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    log.info("joined as %d of %d, pid %d", RANK, WORLD, os.getpid())
    torch.manual_seed(3)
    student = torch.nn.Sequential(
        torch.nn.Embedding(options.vocab, options.width), torch.nn.Flatten(), torch.nn.Linear(8 * options.width, 65)
    ).to(options.device)
    if options.load:
        student.load_state_dict(torch.load(options.load))
        log.info("restored %s", options.load)
    if options.fault == "mesh":
        dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weights, strict = list(student.parameters()), options.fault == "norm"
    for step in range(1, options.steps + 1):
        tokens = torch.randint(0, 400, (16, 8))
        if options.fault == "nan-teacher" and step >= options.at:
            teacher = torch.full((16, 65), math.nan)
        else:
            teacher = torch.randn(16, 65)
        struck = options.fault and options.on == RANK and step == options.at
        if struck and not options.monitored:
            at_step(options, step, torch, dist)
        if options.fault == "skip" and options.on == RANK and step == options.at:
            continue
        loss = torch.nn.functional.mse_loss(student(tokens), teacher)
        loss.backward()
        if options.fault == "norm" and step >= options.at:
            weights[0].grad.fill_(math.inf)
        for each in weights:
            dist.all_reduce(each.grad)
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=strict)
        with torch.no_grad():
            for each in weights:
                each -= options.lr * each.grad / WORLD
                each.grad = None
        if options.fault == "sample" and step >= options.at:
            torch.multinomial(torch.softmax(student(tokens) * math.inf, -1), 1)
        if struck and options.monitored:
            at_step(options, step, torch, dist)
        if options.monitored:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=options.timeout), wait_all_ranks=True)
        if step % 3 == 0:
            log.info("it %d/%d kd_loss %.4f grad %.3f", step, options.steps, loss.item(), norm.item())
        if options.noise and step % 7 == 0:
            log.warning("batch %d: 2 samples failed the filter (0 errors are fatal), drew others", step)
        if options.noise and step == 10:
            try:
                raise TimeoutError("metrics server did not answer within 2.0 s")
            except TimeoutError:
                log.exception("could not push metrics, will try again with the next ones")
        if asked:
            log.warning("signal %d received: saving at it %d and leaving", asked[0], step)
            torch.save(student.state_dict(), "preempted.pt")
            sys.exit(143)
        time.sleep(options.sleep)
    dist.barrier()
    if options.save and RANK == 0:
        torch.save(student.state_dict(), options.save)
        log.info("wrote %s (%d bytes)", options.save, Path(options.save).stat().st_size)
    dist.destroy_process_group()
    log.info("done")


if __name__ == "__main__":
    main()
