"""Starts ranks as a platform does, with its form of lines. `tide_places.py --style S -n N [options] -- COMMAND`."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HOSTS = [f"hv-{number:02d}" for number in range(21, 29)]


def stamp(form="%Y-%m-%dT%H:%M:%S"):
    return time.strftime(form, time.gmtime())


def fraction():
    return f"{time.time() % 1:.6f}"[2:]


PREFIX = {
    "stern": lambda rank, pid: f"tide-worker-{rank} trainer ",
    "kubectl": lambda rank, pid: f"[pod/tide-worker-{rank}/trainer] ",
    "swarm": lambda rank, pid: f"tide_trainer.{rank + 1}.x7k2m9@{HOSTS[rank]}    | ",
    "syslog": lambda rank, pid: f"{time.strftime('%b %d %H:%M:%S', time.gmtime())} {HOSTS[rank]} tide[{pid}]: ",
    "rfc5424": lambda rank, pid: f"<14>1 {stamp()}.{fraction()}Z {HOSTS[rank]} tide {pid} rank{rank} - ",
    "cri": lambda rank, pid: f"{stamp()}.{fraction()}Z stdout F ",
    "torchx": lambda rank, pid: f"trainer/{rank} ",
    "vertex": lambda rank, pid: f"INFO {stamp('%Y-%m-%d %H:%M:%S')} +0000 workerpool{min(rank, 1)}-{max(rank - 1, 0)} ",
    "batch": lambda rank, pid: f"{stamp()}.{fraction()[:3]}Z tide:4/default/node-{rank} ",
    "pbs": lambda rank, pid: f"[{HOSTS[rank]}:{rank}] ",
    "supervisor": lambda rank, pid: "",
    "azure": lambda rank, pid: "",
    "condor": lambda rank, pid: "",
    "ansible": lambda rank, pid: "",
    "fluent": lambda rank, pid: "",
    "nomad": lambda rank, pid: "",
}
FILES = {
    "cri": "tide_tide-worker-{rank}_7c1f/trainer/0.log",
    "azure": "user_logs/std_log_process_{rank:02d}.txt",
    "supervisor": "trainer_{rank:02d}.log",
    "condor": "tide.{rank}.out",
    "nomad": "{host}/alloc/logs/tide.stdout.0",
}
END = {
    "stern": "- tide-worker-{rank} › trainer (exit code {code})",
    "kubectl": "error: pod tide-worker-{rank} container trainer terminated: exit code {code}",
    "swarm": "tide_trainer.{number}.x7k2m9  Failed  \"task: non-zero exit ({code})\"",
    "syslog": "{day} {host} systemd[1]: tide@{rank}.service: Main process exited, {how}",
    "rfc5424": "<27>1 {now}Z {host} systemd 1 - - tide@{rank}.service: Main process exited, {how}",
    "torchx": "torchx.runner: trainer/{rank} exited with {code}",
    "vertex": "ERROR {now} +0000 service The replica {pool} exited with a non-zero status of {code}.",
    "batch": "{now}Z AWS Batch: node index {rank} Essential container in task exited, exit code {code}",
    "pbs": "pbsdsh: task 0x{number:08x} on {host} exit status {code}",
    "supervisor": "{now},014 {level} exited: trainer_{rank:02d} ({how}; not expected)",
    "condor": "007 (412.{rank:03d}.000) {now} Job terminated: {how}",
    "ansible": "{host} | FAILED | rc={code} >>",
    "nomad": "{now}  Terminated  Exit Code: {code} ({host})",
    "azure": "{now}Z [lifecycler] process {rank} finished with return code {code}",
    "cri": "{now}Z kubelet pod tide-worker-{rank} container trainer {how}",
    "fluent": '{{"time": "{now}Z", "source": "kubelet", "log": "container trainer of tide-worker-{rank}: {how}"}}',
}  # fmt: skip


def how(code):
    return f"terminated by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class Launch:
    """The ranks of one job."""

    def __init__(self, options, command):
        self.style, self.number, self.options = options.style, options.n, options
        self.out, self.lock, self.text, self.seen = Path(os.environ["OUT"]), threading.Lock(), {}, threading.Event()
        port = str(random.randint(20000, 29000))
        self.workers = []
        for rank in range(options.n):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(options.world or options.n), "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", port), "HOST": HOSTS[rank]}
            given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.workers.append(subprocess.Popen(command, env=env, **given))
            self.text[rank] = []
            threading.Thread(target=self.read, args=(rank,), daemon=True).start()
            if self.style == "supervisor":
                self.say(f"{stamp('%Y-%m-%d %H:%M:%S')},201 INFO spawned: 'trainer_{rank:02d}' with pid {70 + rank}")

    def say(self, text):
        with self.lock:
            print(text, flush=True)

    def read(self, rank):
        worker = self.workers[rank]
        for raw in worker.stdout:
            text = raw.decode("utf-8", "replace").rstrip("\n")
            if self.options.after and self.options.after in text:
                self.seen.set()
            self.place(rank, text, PREFIX[self.style](rank, 4000 + 17 * rank))

    def place(self, rank, text, prefix):
        if self.style == "ansible":
            self.text[rank].append(text)
        elif self.style == "fluent":
            about = {"pod_name": f"tide-worker-{rank}", "container_name": "trainer", "host": HOSTS[rank]}
            self.say(json.dumps({"time": f"{stamp()}.{fraction()}Z", "stream": "stdout", "log": text, "k8s": about}))
        elif self.style in FILES:
            path = self.out / FILES[self.style].format(rank=rank, host=HOSTS[rank])
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write((prefix + text + ("\r\n" if self.style == "azure" else "\n")).encode())
        else:
            self.say(prefix + text)

    def kill(self):
        rank, wait, name = self.options.kill.split(":")
        self.seen.wait(120)
        time.sleep(float(wait))
        os.killpg(self.workers[int(rank)].pid, getattr(signal, name))

    def wait(self):
        if self.options.kill:
            threading.Thread(target=self.kill, daemon=True).start()
        left, ends, worst = set(range(self.number)), None, 0
        while left and (ends is None or time.monotonic() < ends):
            time.sleep(0.05)
            for rank in sorted(left):
                code = self.workers[rank].poll()
                if code is None:
                    continue
                left.discard(rank)
                if code:
                    worst, ends = code, ends or time.monotonic() + self.options.grace
                    time.sleep(0.2)
                    self.ended(rank, code)
        for rank in left:
            os.killpg(self.workers[rank].pid, signal.SIGTERM)
        time.sleep(0.5)
        for rank in left:
            os.killpg(self.workers[rank].pid, signal.SIGKILL)
        time.sleep(0.3)
        if self.style == "ansible":
            for rank in range(self.number):
                code = self.workers[rank].poll()
                if not code:
                    self.say(f"{HOSTS[rank]} | CHANGED | rc=0 >>")
                else:
                    self.say(f"{HOSTS[rank]} | FAILED | rc={code if code > 0 else 128 - code} >>")
                self.say("\n".join(self.text[rank]) + ("non-zero return code" if code else ""))
        return 1 if worst else 0

    def ended(self, rank, code):
        now = stamp("%Y-%m-%d %H:%M:%S")
        if self.style == "ansible":
            return
        status = code if code > 0 else 128 - code
        pool = f"workerpool{min(rank, 1)}-{max(rank - 1, 0)}"
        facts = {"rank": rank, "number": rank + 1, "host": HOSTS[rank], "code": status, "how": how(code), "now": now}
        facts |= {"pool": pool, "level": "WARN", "day": time.strftime("%b %d %H:%M:%S", time.gmtime())}
        self.say(END[self.style].format(**facts))


if __name__ == "__main__":
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", required=True)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--world", type=int)
    parser.add_argument("--kill", help="rank:seconds:SIGNAL")
    parser.add_argument("--after", help="text after which the seconds count")
    parser.add_argument("--grace", type=float, default=5.0)
    sys.exit(Launch(parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]).wait())
