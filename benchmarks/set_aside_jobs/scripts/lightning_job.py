"""A small classifier in PyTorch Lightning."""

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    """Rows of a synthetic table, read one by one."""

    def __init__(self, rows, bad_row=None, kill_worker_at=None, delay=0.0):
        self.generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(rows, 16, generator=self.generator)
        self.labels = (self.features.sum(1) > 0).long()
        self.bad_row, self.kill_worker_at, self.delay = bad_row, kill_worker_at, delay

    def __len__(self):
        return len(self.labels)

    def parse(self, index):
        raw = json.dumps({"row": index, "label": int(self.labels[index])})
        return json.loads(raw if index != self.bad_row else raw[:9])

    def __getitem__(self, index):
        time.sleep(self.delay)
        if index == self.kill_worker_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.features[index], self.parse(index)["label"]


class Classifier(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        features, labels = batch
        if self.args.spike_at is not None and self.global_step == self.args.spike_at:
            features = features * 60
        time.sleep(self.args.step_seconds)
        loss = nn.functional.cross_entropy(self.net(features), labels)
        if self.args.log_of_zero and self.global_step >= self.args.log_of_zero:
            loss = loss + torch.log(torch.relu(-loss.detach().abs())) * self.net[0].weight.sum()
        self.log("train_loss", loss, prog_bar=True)
        if self.args.print_every and self.global_step % self.args.print_every == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch, batch_idx):
        features, labels = batch
        time.sleep(self.args.val_seconds)
        self.log("val_loss", nn.functional.cross_entropy(self.net(features), labels), prog_bar=True)

    def on_train_epoch_end(self):
        if self.args.export and self.trainer.is_global_zero:
            torch.save(self.net.state_dict(), "export.pt")
            self.trainer.strategy.barrier("export")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.args.lr)


class Table(L.LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def rows(self):
        rank = self.trainer.global_rank
        return self.args.rows - (self.args.fewer_rows if rank == 0 else 0)

    def train_dataloader(self):
        args = self.args
        bad = args.bad_row if self.trainer.global_rank == 1 else None
        kill = args.kill_worker_at if self.trainer.global_rank == 1 else None
        data = Shards(self.rows(), bad, kill)
        return DataLoader(data, args.batch, num_workers=args.workers, shuffle=args.shuffle)

    def val_dataloader(self):
        return DataLoader(Shards(64), self.args.batch)


class Progress(Callback):
    """Writes metrics as lines of JSON."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero and trainer.global_step % 5 == 0:
            row = {"ts": time.strftime("%Y-%m-%dT%H:%M:%S"), "level": "info", "step": trainer.global_step}
            print(
                json.dumps({**row, "loss": round(outputs["loss"].item(), 4), "epoch": trainer.current_epoch}),
                flush=True,
            )


def main():
    options = argparse.ArgumentParser()
    for name, default in {
        "rows": 256,
        "batch": 16,
        "workers": 0,
        "epochs": 2,
        "fewer_rows": 0,
        "devices": 2,
        "print_every": 0,
        "timeout": 60,
    }.items():
        options.add_argument(f"--{name}", type=int, default=default)
    for name in ("bad_row", "kill_worker_at", "spike_at", "log_of_zero"):
        options.add_argument(f"--{name}", type=int)
    for name, default in {"step_seconds": 0.0, "val_seconds": 0.0, "lr": 1e-3, "max_seconds": 0.0}.items():
        options.add_argument(f"--{name}", type=float, default=default)
    for name in ("export", "early", "json", "shuffle", "own_sampler", "bar"):
        options.add_argument(f"--{name}", action="store_true")
    for name, default in {"accelerator": "cpu", "resume": "", "precision": "32-true"}.items():
        options.add_argument(f"--{name}", default=default)
    args = options.parse_args()
    L.seed_everything(7)
    callbacks = [ModelCheckpoint("checkpoints", filename="last-{epoch}", save_top_k=1)]
    if args.early:
        callbacks.append(EarlyStopping("val_loss", patience=1, min_delta=args.lr, verbose=True, check_finite=True))
    if args.json:
        callbacks.append(Progress())
    strategy = "auto"
    if args.devices > 1 and args.accelerator == "cpu":
        strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=args.timeout))
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=strategy,
        precision=args.precision,
        max_epochs=args.epochs,
        max_time=timedelta(seconds=args.max_seconds) if args.max_seconds else None,
        callbacks=callbacks,
        enable_progress_bar=args.bar,
        logger=False,
        use_distributed_sampler=not args.own_sampler,
        detect_anomaly=bool(args.log_of_zero) and not args.early,
        log_every_n_steps=5,
    )
    trainer.fit(
        Classifier(args), Table(args), ckpt_path=args.resume or None, weights_only=False if args.resume else None
    )
    if trainer.is_global_zero:
        print("saved to", Path("checkpoints").resolve(), flush=True)


if __name__ == "__main__":
    main()
