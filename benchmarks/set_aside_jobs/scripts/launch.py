"""Starts copies of a command and prints their lines as mpirun, docker compose, kubectl or srun would."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

LOCK = threading.Lock()
WANTED = []
"""What must have been printed before `--signal` counts its seconds."""


def prefix(style, rank, stream, stamp):
    if style == "mpi":
        return f"[1,{rank}]<{stream}>:"
    if style == "compose":
        return f"trainer-{rank}  | "
    if style == "kubectl":
        return f"[pod/{stamp}-worker-{rank}/pytorch] "
    if style == "swarm":
        return f"lab_trainer.{rank + 1}.{stamp}@swarm-{rank + 3}    | "
    if style == "hydra":
        return f"[{rank}] "
    if style == "stern":
        return f"{stamp}-worker-{rank} pytorch "
    if style == "stamped":
        return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime()) + f"{time.time() % 1:.9f}"[2:] + f"Z {stamp}-{rank} "
    if style == "pdsh":
        return f"{stamp}{rank + 1:02d}: "
    return f"{rank}: "


def show(style, rank, pipe, stream, stamp):
    for raw in iter(pipe.readline, b""):
        line = raw.decode("utf-8", "replace").rstrip("\n")
        if style == "fluent":
            record = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time.time() % 1:.6f}"[2:8] + "Z",
                "stream": stream,
            }
            line = json.dumps(
                {**record, "kubernetes": {"pod_name": f"{stamp}-{rank}", "host": f"ip-10-3-{rank}-18"}, "log": line}
            )
        else:
            line = prefix(style, rank, stream, stamp) + line
        if WANTED and WANTED[0] in line:
            WANTED.clear()
        with LOCK:
            print(line, flush=True)


def end(style, rank, code, pid):
    rule, node = "-" * 74, os.environ.get("NODE", "c2-14")
    if style == "compose":
        print(f"trainer-{rank} exited with code {code if code >= 0 else 128 - code}", flush=True)
    if style == "mpi" and code < 0:
        how = f"exited on signal {-code} ({signal.strsignal(-code)})"
        print(rule, f"mpirun noticed that process rank {rank} with PID {pid} on node {node} {how}.", rule, sep="\n")
    if style == "mpi" and code > 0:
        print(rule, "Primary job  terminated normally, but 1 process returned", sep="\n")
        print("a non-zero exit code. Per user-direction, the job has been aborted.", rule, rule, sep="\n")
        print("mpirun detected that one or more processes exited with non-zero status, thus causing")
        print("the job to be terminated. The first process to do so was:\n")
        print(f"  Process name: [[41734,1],{rank}]", f"  Exit code:    {code}", rule, sep="\n", flush=True)
    if style == "hydra" and code:
        bar = "=" * 83
        print(f"\n{bar}", "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", sep="\n")
        print(
            f"=   RANK {rank} PID {pid} RUNNING AT {node}",
            f"=   KILLED BY SIGNAL: {-code} ({signal.strsignal(-code)})" if code < 0 else f"=   EXIT STATUS: {code}",
            bar,
            sep="\n",
            flush=True,
        )
    if style == "pdsh" and code:
        print(
            f"pdsh@login1: {os.environ.get('STAMP', 'node')}{rank + 1:02d}: ssh exited with exit code {code % 256}",
            flush=True,
        )
    if style == "srun" and code:
        reason = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
        print(f"srun: error: {node}: task {rank}: {reason}", flush=True)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--style", default="mpi")
    options.add_argument("-n", type=int, default=2)
    options.add_argument("--stamp", default="sort-7f9c")
    options.add_argument(
        "--grace", type=float, default=0.0, help="seconds from the first failure until the rest is killed"
    )
    options.add_argument("--signal", help="RANK:SECONDS:SIGNAL sent from outside")
    options.add_argument("--after", help="text to wait for before the seconds of --signal count")
    options.add_argument("command", nargs=argparse.REMAINDER)
    args = options.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    port = str(20000 + os.getpid() % 9000)
    WANTED.extend([args.after] if args.after else [])
    ranks, threads = [], []
    for rank in range(args.n):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(args.n),
            "MASTER_ADDR": "127.0.0.1",
            "LOCAL_RANK": str(rank),
        }
        env.setdefault("MASTER_PORT", port)
        one = subprocess.Popen(args.command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        for pipe, stream in ((one.stdout, "stdout"), (one.stderr, "stderr")):
            threads.append(threading.Thread(target=show, args=(args.style, rank, pipe, stream, args.stamp)))
            threads[-1].start()
        ranks.append(one)

    def stop(*_):
        if args.style == "srun":
            place, limit = os.environ.get("NODE", "c2-14"), time.strftime("%Y-%m-%dT%H:%M:%S")
            print(
                f"slurmstepd: error: *** STEP {args.stamp}.0 ON {place} CANCELLED AT {limit} DUE TO TIME LIMIT ***",
                flush=True,
            )
        for each in ranks:
            each.terminate()

    signal.signal(signal.SIGTERM, stop)
    began, failed, left, sent = time.monotonic(), None, set(range(args.n)), False
    while left:
        time.sleep(0.1)
        if args.signal and not sent:
            rank, seconds, name = args.signal.split(":")
            began = time.monotonic() if WANTED else began
            if time.monotonic() - began > float(seconds):
                ranks[int(rank)].send_signal(getattr(signal, name))
                sent = True
        for rank in sorted(left):
            if (code := ranks[rank].poll()) is not None:
                left.discard(rank)
                time.sleep(0.3)
                if failed is None or args.style != "mpi":
                    end(args.style, rank, code, ranks[rank].pid)
                failed = failed or (time.monotonic() if code else None)
        if failed and args.grace and time.monotonic() - failed > args.grace:
            for rank in left:
                ranks[rank].terminate()
    for each in threads:
        each.join()
    return max(abs(each.returncode) for each in ranks)


if __name__ == "__main__":
    sys.exit(main())
