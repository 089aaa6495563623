"""Starts the ranks of a command and prints their lines and ends as a platform would: prte, sagemaker, skypilot, ..."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

LOCK = threading.Lock()
HOSTS = os.environ.get("HOSTS", "c3-11,c3-12,c3-13,c3-14").split(",")
PLACES = ("head", "worker1", "worker2", "worker3")
PIDS: dict[int, int] = {}
WANTED: list[str] = []


def clock(form="%H:%M:%S"):
    return time.strftime(form, time.gmtime())


def fine(digits=6):
    return clock("%Y-%m-%dT%H:%M:%S.") + f"{time.time() % 1:.9f}"[2 : 2 + digits]


def prefix(style, rank, stream, stamp):
    """What stands before a line of a rank."""
    host = HOSTS[rank % len(HOSTS)]
    at = "" if rank == 0 else f", ip=10.12.0.{rank + 4}"
    return {
        "prte": f"[prterun-{HOSTS[0]}-{os.getpid()}@1,{rank}]<{stream}>: ",
        "timed": clock("%a %b %d %H:%M:%S %Y") + f"[1,{rank}]<{stream}>:",
        "sagemaker": f"[1,mpirank:{rank},algo-{rank + 1}]<{stream}>:",
        "skypilot": f"({PLACES[rank]}, rank={rank}, pid={PIDS.get(rank, 0)}{at}) ",
        "determined": f"[{fine(3)}Z] {stamp[:8]} || [rank={rank}] ",
        "honcho": f"{clock()} {f'rank.{rank}':<12}| ",
        "flux": f"{rank}: ",
        "jobset": f"[pod/{stamp}-workers-0-{rank}-{'bdfk'[rank]}x7qp/trainer] {fine(9)}Z ",
        "clush": f"{host}: ",
        "parallel": f"{host}\t",
        "journal": f"{fine()}+0000 {host} {stamp}[{PIDS.get(rank, 0)}]: ",
        "compose": f"{stamp}-trainer-{rank + 1}  | ",
        "step": f"{rank:2d}: ",
    }.get(style, "")


def show(style, rank, pipe, stream, stamp):
    for raw in iter(pipe.readline, b""):
        line = prefix(style, rank, stream, stamp) + raw.decode("utf-8", "replace").rstrip("\n")
        if WANTED and WANTED[0] in line:
            WANTED.clear()
        with LOCK:
            print(line, flush=True)


def end(style, rank, code, stamp):
    """What the platform prints when a rank has ended; a signal is a negative code."""
    host, pid = HOSTS[rank % len(HOSTS)], PIDS[rank]
    status = code if code >= 0 else 128 - code
    name = signal.Signals(-code).name if code < 0 else ""
    rule = "-" * 74
    lines = {}
    if code < 0:
        what = (
            f"process rank {rank} with PID {pid} on node {host} exited on\nsignal {-code} ({signal.strsignal(-code)})."
        )
        lines["prte"] = lines["timed"] = f"{rule}\nprterun noticed that {what}\n{rule}"
        lines["journal"] = (
            f"{fine()}+0000 {host} systemd[1]: {stamp}@{rank}.service: Main process exited, code=killed, "
            f"status={-code}/{name[3:]}\n{fine()}+0000 {host} systemd[1]: {stamp}@{rank}.service: Failed with result "
            "'signal'."
        )
        lines["flux"] = f"flux-job: task {rank} {signal.strsignal(-code)}"
        lines["step"] = f"srun: error: {host}: task {rank}: {signal.strsignal(-code)}"
    elif code:
        lines["prte"] = lines["timed"] = (
            f"{rule}\nprterun detected that one or more processes exited with non-zero status,\nthus causing the job "
            f"to be terminated. The first process to do so was:\n\n   Process name: [prterun-{HOSTS[0]}-"
            f"{os.getpid()}@1,{rank}] Exit code:    {code}\n{rule}"
        )
        lines["journal"] = (
            f"{fine()}+0000 {host} systemd[1]: {stamp}@{rank}.service: Main process exited, code=exited, "
            f"status={code}/FAILURE"
        )
        lines["flux"] = f"flux-job: task {rank} exited with exit code {code}"
        lines["step"] = f"srun: error: {host}: task {rank}: Exited with exit code {code}"
    if code:
        lines["determined"] = f"[{fine(3)}Z] {stamp[:8]} || ERROR: [{rank}] process exited with non-zero code {status}"
        lines["clush"] = f"clush: {host}: exited with exit code {status}"
    lines["honcho"] = f"{clock()} {'system':<12}| rank.{rank} stopped (rc={code})"
    lines["compose"] = f"{stamp}-trainer-{rank + 1} exited with code {status}"
    if style in lines:
        with LOCK:
            print(lines[style], flush=True)


def last(style, codes, stamp):
    """What the platform prints when everything has ended."""
    statuses = [each if each >= 0 else 128 - each for each in codes]
    if style == "skypilot" and any(statuses):
        print(f"ERROR: Job 1 failed with return code list: {statuses} ")
    if style == "skypilot" and not any(statuses):
        print("✓ Job finished (status: SUCCEEDED).")
    if style == "sagemaker":
        stamped = clock("%Y-%m-%d %H:%M:%S,") + "118"
        if any(statuses):
            print(f"{stamped} sagemaker-training-toolkit ERROR    Reporting training FAILURE")
            print(f"{stamped} sagemaker-training-toolkit ERROR    ExecuteUserScriptError:\nExitCode {max(statuses)}")
        else:
            print(f"{stamped} sagemaker-training-toolkit INFO     Reporting training SUCCESS")
    if style == "determined":
        word = "failed with non-zero exit code" if any(statuses) else "exited successfully with a zero exit code"
        print(f"[{fine(3)}Z] {stamp[:8]} || INFO: container {word}{f' {max(statuses)}' if any(statuses) else ''}")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--style", default="prte")
    options.add_argument("-n", type=int, default=2)
    options.add_argument("--stamp", default="asr")
    options.add_argument("--grace", type=float, default=0.0, help="seconds from a failure until the rest is ended")
    options.add_argument("--kill", help="RANK:SECONDS:SIGNAL sent from outside, after --after was printed")
    options.add_argument("--after")
    options.add_argument("--own", action="append", default=[], help="RANK:NAME=VALUE for the environment of one rank")
    options.add_argument("command", nargs=argparse.REMAINDER)
    args = options.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    WANTED.extend([args.after] if args.after else [])
    port = os.environ.get("MASTER_PORT", str(20000 + os.getpid() % 9000))
    ranks, threads = [], []
    for rank in range(args.n):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(args.n), "LOCAL_RANK": "0", "MASTER_PORT": port}
        env["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "127.0.0.1")
        for each in args.own:
            number, _, pair = each.partition(":")
            env |= dict([pair.split("=", 1)]) if int(number) == rank else {}
        one = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        PIDS[rank] = one.pid
        for pipe, stream in ((one.stdout, "stdout"), (one.stderr, "stderr")):
            threads.append(
                threading.Thread(target=show, args=(args.style, rank, pipe, stream, args.stamp), daemon=True)
            )
            threads[-1].start()
        ranks.append(one)
    began, failed, left, sent = 0.0, 0.0, set(range(args.n)), False
    while left:
        time.sleep(0.1)
        began = began or (0.0 if WANTED else time.monotonic())
        if args.kill and began and not sent:
            rank, seconds, name = args.kill.split(":")
            if time.monotonic() - began > float(seconds):
                ranks[int(rank)].send_signal(getattr(signal, name))
                sent = True
        for rank in sorted(left):
            if (code := ranks[rank].poll()) is not None:
                left.discard(rank)
                time.sleep(0.4)
                if not (failed and args.style in ("prte", "timed")):
                    end(args.style, rank, code, args.stamp)
                failed = failed or (time.monotonic() if code else 0.0)
        if failed and args.grace and time.monotonic() - failed > args.grace:
            for rank in left:
                ranks[rank].terminate()
    for each in threads:
        each.join(4.0)
    last(args.style, [each.returncode for each in ranks], args.stamp)
    return max(abs(each.returncode) for each in ranks)


if __name__ == "__main__":
    sys.exit(main())
