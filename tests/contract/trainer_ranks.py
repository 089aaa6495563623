"""Trainer ranks of every kind as real processes, used through the trainer protocol alone, and the expected results for
the same data, computed with transformers and torch.
"""

import importlib
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import replicated_trainer
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.config.algorithm import CrossEntropy, PolicyLoss
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.forest_builder import forest_from_documents, forest_from_rollouts
from lockstep.data.micro_batch import MicroBatch, MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.packing import PackingMode
from lockstep.data.samples import Completion, Document, Group, Prompt, Rollouts
from lockstep.models.model_facts import model_facts
from lockstep.models.tiny_model import make_tiny
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError, NonFinite, TrainerUnsupported
from lockstep.train.trainer_kinds import TRAINERS, trainer_kind
from lockstep.train.trainer_protocol import Trainer
from lockstep.train.trainer_service import TrainerService
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder import recorder

DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu")
"""`cuda` runs the contract on GPUs, one for each rank: `script/gpu trainer`."""
TEMPERATURE = 0.8
LR = 2e-3
FAMILIES = ("qwen2", "llama")
DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in (2, 3, 1, 0))
"""DeepSpeed at each of its stages."""
LONG = ("deepspeed-0", "deepspeed-1")
"""Kinds whose whole contract is a long suite."""
KINDS = tuple(dict.fromkeys([*(kind for kind in TRAINERS if kind != "deepspeed"), *DEEPSPEED, replicated_trainer.KIND]))
"""The kinds of the package, and one of these tests."""
SAVE_LIMIT_S = 60.0


def trainer_of(kind: str) -> str:
    """The value of `trainer.kind`, without the stage."""
    return kind.partition("-")[0]


def make_models(folder: Path) -> None:
    for seed, family in enumerate(FAMILIES):
        # an odd number of rows: the last rank's shard is shorter
        sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 51}
        make_tiny(folder / family, family=family, tie_embeddings=family == "qwen2", seed=seed, **sizes)


def config(
    folder: Path, family: str, recipe: str, model: dict[str, Any] | None = None, **trainer: Any
) -> SFTConfig | GRPOConfig:
    kind, *rest = str(trainer.pop("kind", "fsdp2")).split("-")  # such as deepspeed-2-offload, deepspeed-3-hpz
    chosen: dict[str, Any] = {"kind": kind}
    dtype = "bfloat16" if "sums" in rest else "float32"
    if rest:
        zero = {"stage": int(rest[0]), "offload_optimizer": {"device": "cpu" if "offload" in rest else "auto"}}
        zero |= {"overlap_comm": True} if "overlap" in rest else {}
        if "hpz" in rest:  # small parameters too are gathered for each pass
            zero |= {"zero_hpz_partition_size": 2, "param_persistence_threshold": 0}
            chosen["ranks"] = 2
        chosen["deepspeed"] = {"zero_optimization": zero}
        if "sums" in rest:  # of bfloat16 gradients, in float32
            chosen["deepspeed"]["data_types"] = {"grad_accum_dtype": "fp32"}
    common: dict[str, Any] = {
        "name": "contract",
        "steps": 10,
        "model": {"path": str(folder / family), "dtype": dtype, **(model or {})},
        "data": {"path": "unused.jsonl"},
        "trainer": {
            # a larger eps: else AdamW turns gradients that are only rounding errors into full updates
            "optimizer": {"lr": LR, "weight_decay": 0.1, "eps": 1e-5},
            "schedule": {"kind": "linear", "warmup_steps": 2},
            "max_grad_norm": 0.5,
            "collective_timeout_s": 60,
            **chosen,
            **trainer,
        },
    }
    if recipe == "sft":
        return SFTConfig.model_validate({"recipe": "sft", **common})
    loss = {
        "entropy_coefficient": 0.02,
        "kl": {"coefficient": 0.3},
        "importance": {"kind": "truncate", "cap": 1.02},
        "old_logprobs": "trainer",
        "aggregation": "seq-mean-token-mean",
        "clip_low": 0.02,
        "clip_high": 0.03,
    }
    return GRPOConfig.model_validate(
        {
            "recipe": "grpo",
            **common,
            "loss": loss,
            "rollout": {"sampling": {"temperature": TEMPERATURE, "max_tokens": 12}},
            "reward": {"terms": [{"kind": "exact_match"}]},
        }
    )


def documents(count: int = 9) -> list[Document]:
    draw = np.random.default_rng(5)
    made = []
    for i in range(count):
        tokens = draw.integers(10, 60, draw.integers(4, 24)).astype(np.int32)
        made.append(Document(f"0:{i}", i, tokens, np.arange(tokens.size) >= draw.integers(1, 4)))
    return made


def rollouts() -> tuple[Rollouts, np.ndarray]:
    draw = np.random.default_rng(6)
    groups = []
    for g in range(4):
        prompt = Prompt(f"0:{g}", g, draw.integers(10, 60, draw.integers(3, 9)).astype(np.int32), "")
        completions = []
        for k in range(4):
            tokens = draw.integers(10, 60, draw.integers(1, 12)).astype(np.int32)
            logprobs = (-4.6 + 0.1 * draw.standard_normal(tokens.size)).astype(np.float32)
            versions = np.zeros(tokens.size, np.int32)
            completions.append(Completion(f"{g}-{k}", tokens, logprobs, versions, "stop", ""))
        groups.append(Group(prompt, completions))
    return Rollouts(0, 0, groups), draw.standard_normal((4, 4))


def batch_of(
    cfg: SFTConfig | GRPOConfig | TrainRole, ranks: int, budget: int = 400, mode: PackingMode = "forest"
) -> TrainingBatch:
    if isinstance(cfg.objective, CrossEntropy):
        return pack(forest_from_documents(documents()), ranks, budget, mode)
    return pack(forest_from_rollouts(*rollouts()), ranks, budget, mode)


def alone() -> ParallelContext:
    """One rank, without communicators."""
    return ParallelContext(device=device_of(0))


def device_of(rank: int) -> torch.device:
    return torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device(DEVICE)


def create(role: TrainRole, ranks: ParallelContext | None = None, images: Path | None = None) -> Trainer:
    """One rank of the role's trainer; alone, without `ranks`."""
    return trainer_kind(role).create(role, ranks or alone(), 1, images)


def minibatch_of(trainer: Trainer, batch: TrainingBatch, role: TrainRole, rank: int = 0) -> MiniBatch:
    """The batch as one optimizer step, with what the loss needs from the trainer (each rank sets its own part)."""
    if isinstance(role.objective, PolicyLoss):
        everything = batch.everything()
        mine = trainer.evaluate(everything.by_rank[rank], ["logprobs", "reference_logprobs"])
        for name, field_ in (("logprobs", "old_logprob"), ("reference_logprobs", "reference_logprob")):
            values = [[np.zeros(row.index.size, np.float32) for row in each] for each in everything.by_rank]
            # ratios other than one, without asking the peers: a fixed shift per target
            shift = 0.05 if name == "logprobs" else 0.0
            values[rank] = [
                row[name] + np.float32(shift) * np.cos(packed.index).astype(np.float32)
                for row, packed in zip(mine, everything.by_rank[rank], strict=True)
            ]
            batch.set_field(field_, everything, values)
    return next(iter(batch.minibatches(1, None, role.objective)))


@dataclass
class Result:
    """The results of a rank after some steps."""

    rank: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradient: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """First row and rows, by name, of the clipped gradient of the first step; only where a test needs it."""
    weights: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """First row and rows, by name."""
    extra: dict[str, Any] = field(default_factory=dict)


def rows_of_all(trainer: Trainer) -> dict[str, tuple[int, Tensor]]:
    """First row and rows of each weight that this rank publishes, by name."""
    return {shard.name: (shard.offset, shard.tensor.clone().cpu()) for shard in trainer.shards()}


def take_steps(trainer: Trainer, rows: list[MicroBatch[np.ndarray]], steps: int) -> list[dict[str, float]]:
    """Train some steps on the same micro-batches; returns their metrics."""
    return [trainer.step(rows).values for _ in range(steps)]


def train(trainer: Trainer, batch: TrainingBatch, role: TrainRole, rank: int = 0, steps: int = 3) -> Result:
    """Train some steps on the same batch."""
    rows = minibatch_of(trainer, batch, role, rank).by_rank[rank]
    metrics = take_steps(trainer, rows, steps)
    return Result(rank, metrics, weights=rows_of_all(trainer))


def wait_saved(trainer: Trainer | TrainerService) -> None:
    """Waits for the end of a save as the controller does: by asking."""
    deadline = time.monotonic() + SAVE_LIMIT_S
    while not trainer.saved():
        assert time.monotonic() < deadline, "the save does not end"
        time.sleep(0.005)


def assemble(parts: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    """The full tensors, assembled from the rows of all ranks."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {
        name: torch.cat([rows for _, rows in sorted((p[name] for p in parts if name in p), key=lambda row: row[0])])
        for name in names
    }


# --- expected results: one sequence at a time, full logits, torch.optim and torch's own clipping


def truth(folder: Path, cfg: SFTConfig | GRPOConfig, steps: int = 3) -> Result:
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation="eager")
    reference = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation="eager")
    settings = cfg.trainer.optimizer
    named = dict(model.named_parameters())
    flat = [parameter for parameter in named.values() if parameter.ndim == 1]
    wide = [parameter for parameter in named.values() if parameter.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": settings.weight_decay}, {"params": flat, "weight_decay": 0.0}],
        lr=LR,
        eps=settings.eps,
    )
    result = Result(0)
    old = None
    for step in range(steps):
        if isinstance(cfg, SFTConfig):
            loss = _sft_truth(model)
        else:
            old = _sequences(model)[0].detach() if old is None else old
            loss = _grpo_truth(model, reference, old, cfg.loss)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.trainer.max_grad_norm or 1e9)
        rate = LR * [1 / 3, 2 / 3, 1.0, 7 / 8][step]
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step == 0:  # for tests of a trainer whose gradients can be seen
            result.gradient = {n: (0, p.grad.clone()) for n, p in named.items() if p.grad is not None}
        optimizer.step()
        result.metrics.append({"loss": float(loss.detach()), "grad_norm": float(norm), "lr": rate})
    result.weights = {name: (0, parameter.detach().clone()) for name, parameter in named.items()}
    return result


def _logprobs(model: Any, tokens: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(tokens.astype(np.int64))
    every = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1)
    return every.gather(-1, ids[1:, None])[:, 0], -(every.exp() * every).sum(-1)


def _sft_truth(model: Any) -> Tensor:
    losses = [-_logprobs(model, d.tokens, 1.0)[0][torch.from_numpy(d.loss_mask[1:])] for d in documents()]
    return torch.cat(losses).mean()


def _sequences(model: Any) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of all completions' tokens, in order."""
    found = []
    for group in rollouts()[0].groups:
        for completion in group.completions:
            both = _logprobs(model, np.concatenate([group.prompt.tokens, completion.tokens]), TEMPERATURE)
            found.append([values[group.prompt.tokens.size - 1 :] for values in both])
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([entropy for _, entropy in found])


def _grpo_truth(model: Any, reference: Any, start: Tensor, loss: PolicyLoss) -> Tensor:
    rolled, advantages = rollouts()
    completions = [completion for group in rolled.groups for completion in group.completions]
    engine = torch.from_numpy(np.concatenate([c.logprobs for c in completions]))
    lengths = torch.tensor([c.tokens.size for c in completions])
    advantage = torch.from_numpy(advantages.ravel().astype(np.float32)).repeat_interleave(lengths)
    weight = (1 / (len(completions) * lengths)).repeat_interleave(lengths)
    old = start + 0.05 * torch.cos(torch.arange(start.numel()))
    with torch.no_grad():
        refs = _sequences(reference)[0]
    logprobs, entropies = _sequences(model)
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    policy = policy * (old - engine).exp().clamp(max=loss.importance.cap)
    divergence = (refs - logprobs).exp() - 1 - (refs - logprobs)
    return (weight * (policy + loss.kl.coefficient * divergence - loss.entropy_coefficient * entropies)).sum()


# --- processes

Case = Callable[[Path, ParallelContext, int], Result]


def launch(
    folder: Path, world: int, cases: Iterable[str], module: str = __name__, replicas: int = 1, limit_s: float = 150.0
) -> dict[str, list[Result]]:
    """Runs cases of a module's `CASES` one after the other on `world` ranks, for `limit_s` seconds at most.

    Returns their results by name, in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "lockstep.train.trainer_service", module])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rest = (world, store.port, list(cases), module, replicas)
    ranks = [context.Process(target=_rank, args=(folder, rank, *rest), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(limit_s)
        assert process.exitcode == 0, f"a rank ended with {process.exitcode}: {_errors(folder)}"
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)] for name in cases
    }


def _errors(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("error-*.txt")))


def _rank(folder: Path, rank: int, world: int, port: int, names: list[str], module: str, replicas: int) -> None:
    torch.set_num_threads(1)
    replicated_trainer.register()
    try:
        cases: dict[str, Case] = importlib.import_module(module).CASES
        from lockstep.train.distributed import join_ranks

        # with a beacon, as in a run: collectives are recorded, and mismatched ones would be refused
        os.environ["LOCKSTEP_BEACONS"] = str(folder / "beacons")
        open_beacon(f"contract-{port}", f"policy-{rank}", "policy", rank)
        ranks = join_ranks(rank, world, device_of(rank), f"tcp://127.0.0.1:{port}", "gen1/policy", 60, replicas)
        for name in names:
            started = time.monotonic()
            result = cases[name](folder, ranks, port)
            result.extra["seconds"] = time.monotonic() - started
            torch.save(result, folder / f"{name}-{rank}.pt")
        found = recorder.current()
        assert world == 1 or (found is not None and found.failures == 0)
        ranks.leave()
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(f"rank {rank}, {name if names else ''}\n{traceback.format_exc()}")
        raise


# --- cases: on one rank in the test's process, or on two ranks


@dataclass(frozen=True)
class Variant:
    """Train some steps with the work split in some way."""

    family: str
    recipe: str
    budget: int = 400
    mode: PackingMode = "forest"
    trainer: dict[str, Any] = field(default_factory=dict)

    def __call__(self, kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
        role = config(folder, self.family, self.recipe, kind=kind, **self.trainer).policy
        batch = batch_of(role, ranks.world, self.budget, self.mode)
        return train(create(role, ranks), batch, role, ranks.rank)


def resume(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """Save after two steps while the third already runs; continue from the checkpoint in a new trainer."""
    role = config(folder, "qwen2", "grpo", kind=kind).policy
    first, saved = create(role, ranks), folder / "saved" / f"ranks-{ranks.world}"
    batch, mine = batch_of(role, ranks.world), (role, ranks.rank, 2)
    train(first, batch, *mine)
    at_save = rows_of_all(first)
    first.save(saved)
    straight = train(first, batch, *mine)
    wait_saved(first)
    second = create(role, ranks)
    second.load(saved)
    result = Result(ranks.rank)
    result.extra["loaded"] = rows_of_all(second)
    result.extra["at_save"] = at_save
    result.extra["steps"] = second.optimizer_step
    result.extra["straight"] = straight
    result.extra["resumed"] = train(second, batch, *mine)
    return result


def reload(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """Load the checkpoint that one rank saved, and continue."""
    role = config(folder, "qwen2", "grpo", kind=kind).policy
    trainer = create(role, ranks)
    trainer.load(folder / "saved" / "ranks-1")
    loaded = rows_of_all(trainer)
    result = train(trainer, batch_of(role, ranks.world), role, ranks.rank, 2)
    result.extra["loaded"] = loaded
    return result


def export(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    role = config(folder, "llama", "sft", kind=kind).policy
    trainer = create(role, ranks)
    result = train(trainer, batch_of(role, ranks.world), role, ranks.rank)
    trainer.export(folder / f"exported-{ranks.world}")
    return result


def gathered(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """Every weight as `shards` and as `gather_weights` return it."""
    trainer = create(config(folder, "qwen2", "sft", kind=kind).policy, ranks)
    result = Result(ranks.rank, weights=rows_of_all(trainer))
    result.extra["parameters"] = trainer.parameters()
    names = [info.name for info in trainer.parameters()]
    dtypes = [torch.bfloat16 if index % 3 == 1 else torch.float32 for index in range(len(names))]
    wanted = list(zip(names, dtypes, strict=True))
    for everyone in (False, True):
        buckets = list(trainer.gather_weights([wanted[:5], wanted[5:]], everyone))
        assert len(buckets) == 2
        pieces = {name: each for bucket in buckets if bucket is not None for name, each in bucket.items()}
        values = {name: torch.cat(pieces[name]).view(dtype).clone().cpu() for name, dtype in wanted if name in pieces}
        result.extra["everyone" if everyone else "first"] = values
    return result


def empty(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """One document for two ranks: the other gets an empty micro-batch."""
    cfg = config(folder, "qwen2", "sft", kind=kind)
    trainer = create(cfg.policy, ranks)
    batch = pack(forest_from_documents(documents()[:1]), ranks.world, 400, "forest")
    minibatch = next(iter(batch.minibatches(1, None, cfg.loss)))
    result = Result(ranks.rank, [trainer.step(minibatch.by_rank[ranks.rank]).values])
    result.weights = rows_of_all(trainer)
    result.extra["empty"] = bool((minibatch.by_rank[ranks.rank][0].index < 0).all())
    return result


def non_finite(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """An infinite advantage in the second micro-batch of the last rank; then a good step, which a second trainer takes
    without the bad one."""
    role = config(folder, "qwen2", "grpo", kind=kind).policy
    trainer, other = create(role, ranks), create(role, ranks)
    mine = minibatch_of(trainer, batch_of(role, ranks.world, budget=60), role, ranks.rank).by_rank[ranks.rank]
    before = rows_of_all(trainer)
    good = mine[1].fields["advantage"].copy()
    if ranks.rank == ranks.world - 1:
        mine[1].fields["advantage"][0] = np.inf
    result = Result(ranks.rank)
    try:
        trainer.step(mine)
    except NonFinite as error:
        result.extra["error"] = (str(error), error.step, error.what, error.places)
    after = rows_of_all(trainer)
    result.extra["untouched"] = all(torch.equal(before[n][1], after[n][1]) for n in before)
    result.extra["steps"] = trainer.optimizer_step
    mine[1].fields["advantage"][:] = good
    result.metrics = take_steps(trainer, mine, 2)
    result.weights = rows_of_all(trainer)
    result.extra["without"] = Result(ranks.rank, take_steps(other, mine, 2), weights=rows_of_all(other))
    return result


def memory(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """A memory checkpoint after one step, and another one after the second; back to the first, and the step again."""
    role = config(folder, "qwen2", "sft", kind=kind).policy
    trainer, result = create(role, ranks), Result(ranks.rank)
    place = folder / f"memory-{kind}-{ranks.world}"
    place.mkdir(exist_ok=True)
    rows = minibatch_of(trainer, batch_of(role, ranks.world), role, ranks.rank).by_rank[ranks.rank]
    copies = MemoryCheckpoints(place, ranks.rank, ranks.world)
    for version in (1, 2):
        result.metrics += take_steps(trainer, rows, 1)
        trainer.save_to_memory(copies, version)
    result.weights = rows_of_all(trainer)
    trainer.load_from_memory(copies, 1)
    result.extra["steps"] = trainer.optimizer_step
    result.metrics += take_steps(trainer, rows, 1)
    result.extra["again"] = rows_of_all(trainer)
    copies.close()
    return result


def adapter(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """Train, publish and export an adapter."""
    role = config(folder, "llama", "sft", {"adapter": {"r": 4}}, kind=kind).policy
    trainer = create(role, ranks)
    result = train(trainer, batch_of(role, ranks.world), role, ranks.rank, 2)
    result.extra["constant"] = {shard.name for shard in trainer.shards() if shard.constant}
    trainer.export(folder / f"merged-{ranks.world}")
    trainer.export_adapter(folder / f"adapter-{ranks.world}")
    return result


@contextmanager
def no_space() -> Iterator[None]:
    """Limit files of this process to a kilobyte: a write beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """The last rank cannot write at first; afterwards it can."""
    trainer = create(config(folder, "qwen2", "sft", kind=kind).policy, ranks)
    result = Result(ranks.rank)
    try:
        if ranks.rank == ranks.world - 1:
            with no_space():
                trainer.save(folder / "full" / "step")
                wait_saved(trainer)
        else:
            trainer.save(folder / "full" / "step")
            wait_saved(trainer)
    except CheckpointError as error:
        result.extra["error"] = str(error)
    result.extra["told_once"] = trainer.saved()
    trainer.save(folder / "full" / "again")
    wait_saved(trainer)
    trainer.load(folder / "full" / "again")
    return result


def service(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """The calls of the controller, with new communicators."""
    result = Result(ranks.rank)
    ranks.leave()
    role = config(folder, "llama", "grpo", kind=kind, threads=1).policy
    served = TrainerService(
        role.model_dump(mode="json"),
        str(folder),
        rank=ranks.rank,
        world=ranks.world,
        store=f"tcp://127.0.0.1:{port}",
        device=str(ranks.device),
        generation=2,
    )
    info = served.setup()
    batch, saved = batch_of(role, ranks.world), str(folder / "service" / "one")
    minibatch = minibatch_of(served.trainer, batch, role, ranks.rank)
    mine = list(minibatch.encode())[ranks.rank]
    result.metrics = [served.step(mine).values]
    served.save(saved)
    result.metrics.append(served.step(mine).values)
    wait_saved(served)
    result.extra["info"] = info
    result.extra["steps"] = (served.info().optimizer_step, served.load(saved))
    result.metrics.append(served.step(mine).values)
    result.extra["values"] = served.evaluate(mine, ["logprobs", "entropy", "reference_logprobs"])
    served.close()
    return result


def absent(kind: str, folder: Path, ranks: ParallelContext, port: int) -> Result:
    """The last rank does not enter the step: the others get an error within the time limit."""
    from lockstep.train.distributed import join_ranks

    role = config(folder, "llama", "sft", kind=kind).policy
    place = f"tcp://127.0.0.1:{port}"
    short = join_ranks(ranks.rank, ranks.world, ranks.device, place, "gen3/policy", ABSENT_LIMIT_S)
    trainer = create(role, short)
    result = Result(ranks.rank)
    started = time.monotonic()
    if ranks.rank < ranks.world - 1:
        try:
            train(trainer, batch_of(role, ranks.world), role, ranks.rank, 1)
        except (RuntimeError, TimeoutError) as error:
            result.extra["error"] = str(error)
    else:
        time.sleep(ABSENT_LIMIT_S + 1.0)
    result.extra["waited"] = time.monotonic() - started
    return result


ABSENT_LIMIT_S = 3.0
"""Time limit of a collective that one rank does not enter."""
VARIANTS: dict[str, Variant] = {
    f"{family}-{recipe}-{name}": Variant(family, recipe, **settings)
    for family in FAMILIES
    for recipe in ("sft", "grpo")
    for name, settings in {
        "plain": {},
        "split": {"budget": 60},
        "block": {"mode": "block"},
        "single": {"mode": "single"},
        "recomputed": {"budget": 60, "trainer": {"activation_checkpointing": True}},
    }.items()
}
SUITE: dict[str, Callable[[str, Path, ParallelContext, int], Result]] = {
    **VARIANTS,
    "again": VARIANTS["qwen2-grpo-split"],
    "resume": resume,
    "reload": reload,
    "export": export,
    "gathered": gathered,
    "empty": empty,
    "non_finite": non_finite,
    "memory": memory,
    "adapter": adapter,
    "full_disk": full_disk,
    "service": service,
    "absent": absent,
}
"""The cases of every kind of trainer."""
OPTIONAL = ("memory", "adapter")
"""Cases of what a kind of trainer may refuse."""
CASES: dict[str, Case] = {f"{kind}:{name}": partial(case, kind) for kind in KINDS for name, case in SUITE.items()}


def refuses(kind: str, case: str, folder: Path) -> bool:
    """Whether a kind of trainer says before anything starts that it lacks what this case needs."""
    planner = TRAINERS[trainer_of(kind)].planner
    if case == "memory":
        cfg = config(folder, "qwen2", "sft", kind=kind)
        return planner.memory_checkpoint(cfg.policy, model_facts(cfg.model, "cpu")) is None
    try:
        planner.check(config(folder, "llama", "sft", {"adapter": {"r": 4}}, kind=kind).policy)
    except TrainerUnsupported:
        return case == "adapter"
    return False


def cases_of(kind: str, folder: Path) -> list[str]:
    """The names in `SUITE` of the cases that this kind of trainer does not refuse."""
    return [name for name in SUITE if name not in OPTIONAL or not refuses(kind, name, folder)]
