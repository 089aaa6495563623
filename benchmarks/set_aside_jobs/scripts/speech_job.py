"""Ranks on gloo that train a small recogniser and average its gradients themselves, with one of many faults."""

import argparse
import datetime
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
log = logging.getLogger("recogniser")
LOCK = threading.Lock()


class Loguru(logging.Formatter):
    def format(self, record):
        stamp = datetime.datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        text = f"{stamp} | {record.levelname:<8} | __main__:{record.funcName}:{record.lineno} - {record.getMessage()}"
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class Structured(logging.Formatter):
    def format(self, record):
        row = {"level": record.levelname.lower(), "ts": round(record.created, 3), "rank": RANK}
        row |= {"event": record.getMessage()}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def set_up_log(form):
    """Chooses how lines look."""
    handler = logging.StreamHandler(sys.stderr if form in ("absl", "plain") else sys.stdout)
    absl = "%(levelname).1s%(asctime)s.%(msecs)06d %(thread)d %(filename)s:%(lineno)d] %(message)s"
    handler.setFormatter(
        {
            "loguru": Loguru(),
            "json": Structured(),
            "absl": logging.Formatter(absl, "%m%d %H:%M:%S"),
            "plain": logging.Formatter("%(message)s"),
            "ranked": logging.Formatter(f"[rank {RANK}/{WORLD}] %(asctime)s %(levelname)s: %(message)s", "%H:%M:%S"),
            "fairseq": logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"),
            "pairs": logging.Formatter(f"level=%(levelname)s worker={RANK} pid=%(process)d msg=%(message)r"),
        }[form]
    )
    log.addHandler(handler)
    log.setLevel(logging.INFO)


class Utterances:
    """Features with a label; one utterance of one rank may be bad."""

    def __init__(self, count, options):
        self.count, self.options = count, options

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import torch

        fault = self.options.fault if self.options.on == RANK and index == self.options.at * 4 else ""
        if fault == "wave":
            import wave

            Path("utt-0113.wav").write_bytes(b"RIFX\0\0\0\0WAVEfmt ")
            with wave.open("utt-0113.wav"):
                pass
        if fault == "frames":
            return torch.randn(57, 40), 3
        if fault == "loader-lock":
            log.info("worker waits for the feature cache")
            LOCK.acquire()
            LOCK.acquire()
        if fault == "loader-memory":
            return torch.zeros(64, 40, 40_000), 3
        return torch.randn(50, 40), index % 12


def strike(options, step, torch, dist):
    """What happens to the process of the fault at its step."""
    fault = options.fault
    if fault == "segv":
        import ctypes

        ctypes.string_at(0)
    if fault == "abort":
        os.abort()
    if fault == "grow":
        kept = []
        while True:
            kept.append(os.urandom(8 << 20))
    if fault == "exit-code":
        log.warning("licence server says 3 of 3 seats are taken, leaving")
        sys.exit(73)
    if fault == "alignment":
        {"a": 4, "b": 9}["ʒ"]
    if fault == "asserts":
        lengths = [50, 49]
        assert lengths[0] == lengths[1], f"blank run of utterance {step * 4}: {lengths[0]} frames, {lengths[1]} labels"
    if fault == "sleep-c":
        import ctypes

        log.info("decoding with the external language model")
        ctypes.CDLL(None).sleep(int(options.seconds))
    if fault == "deadlock":
        done = threading.Event()

        def export():
            with LOCK:
                done.wait()

        threading.Thread(target=export, name="exporter", daemon=True).start()
        time.sleep(1)
        with LOCK:
            done.set()
    if fault == "broadcast":
        dist.broadcast(torch.ones(1), RANK)
    if fault == "dtype":
        dist.all_reduce(torch.ones(64, dtype=torch.float64))
    if fault == "extra-barrier":
        log.info("epoch boundary, waiting for the others")
        dist.barrier()
    if fault == "cache":
        Path("features/cmvn.ark").write_bytes(bytes(64))
    if fault == "rescore":
        log.info("rescoring 40000 hypotheses before the next step")
        time.sleep(options.seconds)
        log.info("rescoring done")


def start(options, torch, dist):
    """Joins the others, with what may be wrong about that."""
    if options.fault == "import" and options.on == RANK:
        import kenlm_fast  # noqa: F401
    if options.fault == "late" and options.on == RANK:
        log.info("copying 300 GB of features to the local disk")
        time.sleep(options.seconds)
    world = WORLD + 1 if options.fault == "world" else WORLD
    limit = datetime.timedelta(seconds=options.join)
    dist.init_process_group("gloo", rank=RANK, world_size=world, timeout=limit)
    log.info(f"process {os.getpid()} joined as rank {RANK} of {world}")
    torch.distributed.barrier()
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") != "DETAIL":
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=options.timeout))


def prepare(options, torch):
    """Makes the model, from a checkpoint if there is one."""
    torch.manual_seed(4)
    wide = 48 if options.fault == "units" and options.on == RANK else 32
    model = torch.nn.Sequential(torch.nn.Linear(40, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 12))
    if options.fault == "lexicon":
        path = Path("lexicon.txt" if options.on != RANK else "lang/lexicon.txt")
        Path("lexicon.txt").write_text("a a\n")
        log.info(f"{len(path.read_text().splitlines())} words in {path}")
    place, first = Path(options.model) if options.model else None, 0
    if place and place.exists():
        kept = torch.load(place, weights_only=True)
        model.load_state_dict(kept["model"])
        first = kept["step"]
        log.info(f"continuing from {place}, step {first}")
    return model, place, first


def save(options, model, place, step, torch, dist):
    """Saves; every rank waits for it."""
    if RANK == 0:
        if options.fault == "save-hang" and step >= options.at:
            log.info(f"writing {place} (step {step})")
            os.mkfifo("upload.pipe")
            with Path("upload.pipe").open("wb") as pipe:
                pipe.write(b"x")
        torch.save({"model": model.state_dict(), "step": step}, place)
        log.info(f"saved {place} (step {step})")
    if options.own_folder:
        mine = Path(options.own_folder) / f"optimizer-{step}-{RANK}.bin"
        mine.write_bytes(bytes(900_000))
        log.info(f"saved {mine}")
    dist.barrier()


def mishaps(options, step):
    """Warnings and survived errors of a healthy run."""
    if step == 5:
        warnings.warn("utterance 88 has 3 frames less than its transcript, padded", RuntimeWarning, stacklevel=1)
    if step == 8 and RANK == 0:
        try:
            import urllib.request

            urllib.request.urlopen("http://127.0.0.1:9/metrics", timeout=2)
        except OSError:
            log.exception("could not push metrics, will retry at the next report")
    if step == 11:
        log.error("hypothesis is empty for 2 of 64 utterances (WER 100% for those)")
    if step == 12 and RANK == 1:
        log.warning("data loader was 3.1 s late, timeout of the prefetcher is 30 s")
    if step == 13:
        log.warning("NaN in the CTC loss of utterance 412 (target longer than input), zeroed (zero_infinity=True)")


def train(options, torch, dist):
    model, place, first = prepare(options, torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    rows = Utterances(options.rows - (40 if options.fault == "fewer" and options.on == RANK else 0), options)
    loader = torch.utils.data.DataLoader(rows, 4, num_workers=options.workers)
    log.info(f"{sum(each.numel() for each in model.parameters())} parameters, {len(loader)} batches per epoch")
    bar = None
    if options.bar and RANK == 0:
        import tqdm

        bar = tqdm.tqdm(total=options.steps, desc="train", mininterval=0.5)
    best, stale = 9.0, 0
    for step, (features, labels) in enumerate(loader, first + 1):
        if step > options.steps:
            break
        if options.on == RANK and step == options.at:
            strike(options, step, torch, dist)
        if options.noise:
            mishaps(options, step)
        if options.fault == "features" and options.on == RANK and step >= options.at:
            features[0, 0, 0] = float("nan")
        loss = torch.nn.functional.cross_entropy(model(features).mean(1), labels)
        own = loss.item()
        if own != own:
            log.error(f"step {step}: loss is nan on rank {RANK} before the gradients are averaged")
        if own != own and options.strict:
            raise FloatingPointError(f"non-finite loss {own} at step {step}")
        loss.backward()
        flat = torch.cat([each.grad.flatten() for each in model.parameters()])
        dist.all_reduce(flat)
        offset = 0
        for each in model.parameters():
            each.grad.copy_(flat[offset : offset + each.numel()].view_as(each) / WORLD)
            offset += each.numel()
        optimizer.step()
        optimizer.zero_grad()
        if bar:
            bar.update()
            bar.set_postfix(loss=f"{own:.3f}")
        elif step % 3 == 0 and (RANK == 0 or options.everyone):
            log.info(
                f"step {step} | loss {own:.3f} | {4 * WORLD / max(options.sleep, 0.05):.0f} utt/s | lr {options.lr}"
            )
        if place and step % options.every == 0:
            save(options, model, place, step, torch, dist)
        if options.patience and step % 4 == 0:
            score = torch.tensor([0.31 if step > 8 else 0.4 - step / 100])
            dist.broadcast(score, 0)
            stale = stale + 1 if score.item() >= best else 0
            best = min(best, score.item())
            log.info(f"validation: WER {score.item():.3f}, best {best:.3f}, {stale} without gain")
            if stale >= options.patience:
                log.info(f"no gain for {stale} validations, stopping early at step {step} of {options.steps}")
                break
        time.sleep(options.sleep)
    if bar:
        bar.close()


def evaluate(options, torch, dist):
    """Only decodes a test set."""
    for part in ("clean", "other"):
        for batch in range(1, 6):
            time.sleep(options.sleep)
            if RANK == 0:
                log.info(f"decoding test-{part}: {batch * 20}/100 utterances")
        errors = torch.tensor([31.0 + RANK, 412.0])
        dist.all_reduce(errors)
        if RANK == 0:
            log.info(
                f"test-{part}: WER {100 * errors[0] / errors[1]:.2f} ({errors[0]:.0f} errors, 0 failed utterances)"
            )


def main():
    parser = argparse.ArgumentParser()
    numbers = {"on": 1, "at": 9, "steps": 24, "rows": 120, "workers": 0, "every": 6, "patience": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in {"seconds": 20.0, "timeout": 60.0, "join": 120.0, "sleep": 0.15, "lr": 0.1, "dump": 0.0}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    for name in ("fault", "model", "own_folder"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--form", default="loguru")
    for name in ("noise", "bar", "evaluate", "strict", "everyone", "faults"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    set_up_log(options.form)
    if options.faults:
        faulthandler.enable()
    if options.dump:
        faulthandler.dump_traceback_later(options.dump, exit=False)
    import torch
    import torch.distributed as dist

    try:
        start(options, torch, dist)
        (evaluate if options.evaluate else train)(options, torch, dist)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        if options.form == "json":
            log.exception("training failed")
            sys.exit(1)
        raise
    log.info(f"rank {RANK} is done")


if __name__ == "__main__":
    main()
