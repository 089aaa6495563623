"""Ranks that learn tides from gauges, with faults. `train_tides.py --fault F --on RANK --form FORM`."""

import argparse
import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

GAUGES = ("brest", "hoek-van-holland", "aberdeen", "cuxhaven", "vigo", "esbjerg")


class Lines(logging.Formatter):
    """One of several forms of a line."""

    def __init__(self, form, rank):
        super().__init__()
        self.form, self.rank = form, rank

    def format(self, record):
        text, level = record.getMessage(), record.levelname
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        parts = f"{int(record.msecs):03d}"
        host = os.environ.get("HOST", "hv-21")
        if self.form == "json":
            return json.dumps({"ts": record.created, "lvl": level.lower(), "rank": self.rank, "msg": text})
        if self.form == "logfmt":
            return f'time={now.replace(" ", "T")}Z level={level.lower()} rank={self.rank} msg="{text}"'
        if self.form == "loguru":
            return f"{now}.{parts} | {level:<8} | __main__:train:{record.lineno} - {text}"
        if self.form == "glog":
            begin = f"{level[0]}{now[5:7]}{now[8:10]} {now[11:]}.{parts}000 {record.process}"
            return f"{begin} train_tides.py:{record.lineno}] {text}"
        if self.form == "log4j":
            return f"{now[2:].replace('-', '/')} {level} TideTrainer: [{host}] {text}"
        if self.form == "struct":
            return f"{now} [{level.lower():<8}] {text:<42} rank={self.rank} host={host}"
        if self.form == "hydra":
            return f"[{now},{parts}][tides.train][{level}] - {text}"
        if self.form == "bracket":
            return f"[{self.rank}/{os.environ.get('WORLD_SIZE')}] {text}"
        return text


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--on", type=int, default=-1)
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--form", default="plain")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--sleep", type=float, default=0.08)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--join", type=float, default=60.0)
    parser.add_argument("--save", default="")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--all", action="store_true", help="every rank prints its steps")
    parser.add_argument("--bar", action="store_true")
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true")
    return parser.parse_args()


class Trainer:
    """The loop of one rank."""

    def __init__(self, given):
        self.given, self.rank = given, int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.log = logging.getLogger("tides")
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(Lines(given.form, self.rank))
        self.log.addHandler(handler)
        self.log.setLevel(logging.INFO)
        self.log.propagate = False
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 1))
        self.step, self.best = 0, 9.0

    def here(self, name):
        return self.given.fault == name and self.rank == self.given.on

    def join(self):
        given = self.given
        if self.here("late-join"):
            self.log.info("copying 212 gauge files to the local disk before the start")
            time.sleep(given.seconds)
        if self.here("no-package"):
            import utide_pack  # noqa: F401
        if self.here("interface"):
            os.environ["GLOO_SOCKET_IFNAME"] = "enp129s0f1"
        if self.here("master-elsewhere"):
            os.environ["MASTER_ADDR"] = "head-of-tides.invalid"
        if self.here("master-refused"):
            os.environ["MASTER_PORT"] = "29777"
        if self.here("old-torch"):
            from packaging.version import Version

            need = "99.1"
            if Version(torch.__version__.split("+")[0]) < Version(need):
                raise RuntimeError(
                    f"tide_kernels was built for torch {need}, but this host has torch {torch.__version__}"
                )
        if self.here("no-option"):
            raise SystemExit(
                "train_tides.py: error: argument --gauges: invalid choice: 'brest2' (choose from 'all', 'brest')"
            )
        self.log.info(
            f"rank {self.rank} of {self.world} joins at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        )
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=given.join))
        if given.timeout != given.join:
            self.group = dist.new_group(timeout=datetime.timedelta(seconds=given.timeout))
        else:
            self.group = dist.group.WORLD
        self.log.info(f"rank {self.rank} on {os.environ.get('HOST', 'hv-21')}: {self.world} ranks are there")

    def batch(self):
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        waves = torch.randn(16, 24, generator=generator)
        return waves, waves[:, :4].sum(1, keepdim=True) * 0.3

    def strike(self, waves, level):
        """Injects the fault of this rank in front of the sums of a step."""
        name, log = self.given.fault, self.log
        if name == "key":
            stations = dict.fromkeys(GAUGES, 0.1)
            return waves * stations["port-louis"], level
        if name == "shape":
            waves = torch.randn(16, 25)
        if name == "unit":
            float("3,41 m")
        if name == "assert":
            assert level.abs().max() < 1e-3, "levels of gauge esbjerg are not in metres"
        if name == "record":
            json.loads('{"gauge": "vigo", "level": 1.2')
        if name == "nan":
            waves = waves * float("nan")
        if name == "pause":
            log.info(f"rebuilding the harmonic tables of gauge {GAUGES[self.rank]} (412 constituents)")
            time.sleep(self.given.seconds)
        if name == "silent":
            time.sleep(self.given.seconds)
        if name == "lock":
            lock = threading.Lock()
            lock.acquire()
            log.info("reads constants under the lock of the table")
            lock.acquire()
        if name == "http":
            import urllib.request

            urllib.request.urlopen("http://127.0.0.1:8931/v1/levels?gauge=vigo", timeout=5).read()
        if name == "hang-http":
            server = socket.create_server(("127.0.0.1", 0))
            log.info(f"asks the weather archive at 127.0.0.1:{server.getsockname()[1]} for pressures")
            client = socket.create_connection(server.getsockname(), timeout=self.given.seconds)
            client.sendall(b"GET /pressures HTTP/1.0\r\n\r\n")
            client.recv(100)
        if name == "dns":
            import urllib.request

            urllib.request.urlopen("http://archive.tides.invalid/levels.parquet", timeout=5).read()
        if name == "absent":
            Path("/mnt/gauges/cuxhaven.bin").read_bytes()
        if name == "stale":
            raise OSError(116, "Stale file handle", "/mnt/gauges/shard-0031.bin")
        if name == "io":
            raise OSError(5, "Input/output error", "/mnt/gauges/shard-0007.bin")
        if name == "abort":
            sys.stderr.write("malloc(): invalid size (unsorted)\n")
            os.abort()
        if name == "files":
            import resource

            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            kept = [Path(os.devnull).open() for _ in range(200)]  # noqa: SIM115
            return waves, level * len(kept)
        if name == "threads":
            raise RuntimeError("can't start new thread")
        if name == "memory":
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
            kept = torch.zeros(3 << 30)
            return waves, level * kept[0]
        if name == "leave":
            log.info("no more gauges for this rank, leaving")
            sys.exit(0)
        if name == "extra":
            total = torch.zeros(1)
            dist.all_reduce(total, group=self.group)
        if name == "exit3":
            os._exit(3)
        return waves, level

    def sums(self, loss):
        for each in self.net.parameters():
            dist.all_reduce(each.grad, group=self.group)
            each.grad /= self.world
        if self.given.fault == "wider" and self.step == self.given.at:
            size = 7 if self.rank == self.given.on else 5
            parts = [torch.zeros(size) for _ in range(self.world)]
            dist.all_gather(parts, torch.ones(size), group=self.group)
        if self.given.fault == "branch" and self.step == self.given.at:
            if self.rank == self.given.on:
                self.log.info("the loss of this rank rose, it broadcasts the weights again")
                dist.broadcast(torch.zeros(3, 3), 0, group=self.group)
            else:
                dist.barrier(group=self.group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return float(total) / self.world

    def save(self):
        if self.rank == 0:
            if self.given.fault == "save-slow":
                self.log.info(f"writing {self.given.save} (step {self.step}) to the object store")
                time.sleep(self.given.seconds)
            torch.save({"step": self.step, "net": self.net.state_dict()}, self.given.save)
            self.log.info(f"saved {self.given.save} at step {self.step}")
        dist.barrier(group=self.group)

    def restore(self):
        if self.given.save and Path(self.given.save).exists():
            kept = torch.load(self.given.save)
            self.net.load_state_dict(kept["net"])
            self.step = kept["step"]
            self.log.info(f"resumed from {self.given.save} at step {self.step}")

    def noise(self):
        if self.step == 3:
            self.log.warning("gauge vigo has 14 gaps, they are interpolated")
            warnings.warn("lr_scheduler.step() before optimizer.step()", stacklevel=1)
        if self.step == 6:
            self.log.error("uploading metrics failed: HTTP 503 from metrics.tides.example, retrying in 1 s (1/5)")
            time.sleep(0.3)
            self.log.info("metrics uploaded after 1 retry")
        if self.step == 9:
            try:
                float("n/a")
            except ValueError:
                self.log.exception("a level could not be read, the sample is skipped")
            self.log.warning(f"rank {self.rank}: step took 2.1x the median, waiting for page cache")

    def train(self):
        given = self.given
        self.join()
        self.restore()
        optimizer, worse = torch.optim.SGD(self.net.parameters(), lr=0.05), 0
        steps = range(self.step, given.steps)
        if given.bar and self.rank == 0:
            from tqdm import tqdm

            steps = tqdm(steps, desc="tides", mininterval=0.2, initial=self.step, total=given.steps)
        for self.step in steps:
            time.sleep(given.sleep)
            waves, level = self.batch()
            if given.noise:
                self.noise()
            if self.rank == given.on and self.step == given.at:
                waves, level = self.strike(waves, level)
            loss = (self.net(waves) - level).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mean = self.sums(loss)
            if not given.evaluate:
                optimizer.step()
            if given.fault == "nan" and mean != mean:
                raise FloatingPointError(
                    f"loss is not finite at step {self.step}: local {float(loss):.4f}, mean {mean:.4f}"
                )
            if self.rank == 0 or given.all:
                word = "eval" if given.evaluate else "step"
                self.log.info(f"{word} {self.step} loss {mean:.4f}" + (f" (rank {self.rank})" if given.all else ""))
            if given.save and self.step % 4 == 3:
                self.step += 1
                self.save()
            worse = worse + 1 if self.step > 4 else 0
            if given.patience and worse >= given.patience:
                self.log.info(
                    f"no better for {worse} evaluations: stopping early at step {self.step}, best loss 0.2981"
                )
                break
        dist.barrier(group=self.group)
        self.log.info(f"rank {self.rank} done, {self.step + 1} steps")
        dist.destroy_process_group()


if __name__ == "__main__":
    trainer = Trainer(arguments())
    try:
        trainer.train()
    except Exception as error:
        if trainer.given.form in ("json", "logfmt"):
            trainer.log.exception(f"training failed: {type(error).__name__}")
            sys.exit(1)
        raise
