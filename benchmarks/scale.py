"""What a step costs the controller of a run with a thousand engines and thousands of trainer ranks.

    python -m benchmarks.scale                                    1,024 engines, 4,096 ranks, 8 on each node
    python -m benchmarks.scale --engines 64 --ranks 256
    python -m benchmarks.scale --per-node 0                       only with each worker connected by itself
    python -m benchmarks.scale --json benchmarks/results/cpu/scale.json

The real controller (buffer, engines, fleet, policy, packing, ledger, handles, messages, codec) drives workers that are
not there: they answer at once, completions come one by one in a random order of engines. The call relays of nodes are
real, without sockets. CPU time is counted, of all threads of the controller, without what the workers' and the relays'
side of this simulation takes. Sockets are counted by themselves: what frames of the mean size take over loopback,
system calls included, times the frames of a step. The `bare` rows are a minimal program with the same messages, samples
and calls, measured in the same run.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.fake_workers import (
    Account,
    FakeWorker,
    Traffic,
    completion_of,
    connect_all,
    make_node,
)
from benchmarks.scale_bounds import Groups, calls_s, frames_s, heads_s, objects_s, payloads_s, routing_s, socket_s
from lockstep.base import waits
from lockstep.cluster.protocol import Worker, WorkerSpec
from lockstep.cluster.rpc.call_relay import DELAY_S
from lockstep.config.algorithm import PPOClip
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.engine_slot import MAX_HOLD_S
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run.lifecycle import infrequent_gc
from lockstep.run.rollout_buffer import RolloutBuffer
from lockstep.run.step_metrics import rollout_metrics, update_metrics
from lockstep.run.trainer_group import TrainerGroup
from lockstep.train.trainer_api import TrainerInfo

COORDINATION = ("submit", "collect", "progress", "load_weights", "step", "write_weights", "metrics", "sockets")
"""Parts that exist because there are many workers; the others are work on the samples themselves."""
BARE = {
    "bare frames": "as many plain writes and reads of the mean sizes, with their authentication codes",
    "bare heads": "the head of each message encoded or decoded once",
    "bare payloads": "the requests of each engine encoded once, the completions of each answer decoded once",
    "bare objects": "the requests of each group and an object for each completion, made and freed",
    "bare calls": "a lock for each message, an entry for each call until it is answered, the worker's progress",
    "bare routing": "an engine with the fewest requests for each group, and each completion taken once",
}
"""What any program of Python with these messages, samples and calls must do (`benchmarks.scale_bounds`), measured in
the same run; not part of a sum."""


@dataclass(frozen=True, slots=True)
class Size:
    engines: int
    ranks: int
    group: int
    tokens: int
    """Of a completion."""
    per_node: int = 8
    """Workers of a node, which its call relay serves; 0: there are no relays."""

    @property
    def prompts(self) -> int:
        """As many as give every rank a completion, and every engine a group."""
        return max(self.engines, self.ranks // self.group)


ROLE = TrainRole(
    name="policy", model=ModelConfig(path="none"), trainer=TrainerConfig(), objective=PPOClip(), optimizer_steps=1
)


class Draws:
    """Prompts without data."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step

    def draw(self, step: int, round: int = 0, count: int | None = None) -> list[Prompt]:
        tokens = np.arange(5, 37, dtype=np.int32)
        return [Prompt(f"{step}:{row}", row, tokens, "p") for row in range(self.per_step)]


class Here:
    """Weights that are on every node already."""

    def store_folder(self, worker: Worker, version: int) -> str | None:
        return "/nowhere"

    def fetch(self, worker: Worker, version: int) -> None: ...

    def progress(self) -> object:
        return 0


class World:
    """A run's controller, and nobody else."""

    def __init__(self, size: Size, folder: Path, steps: int, over_s: float) -> None:
        self.size, self.over_s = size, over_s
        self.account = Account()
        self.ledger = Ledger.create(folder, {"name": "scale"})
        self.engines = self._fakes("engine", "rollout", size.engines)
        self.ranks = self._fakes("policy", "policy", size.ranks)
        self.engine_connections = connect_all(self.engines, size.per_node)
        self.connections = self.engine_connections + connect_all(self.ranks, size.per_node)
        self.account.network.settle()
        for connection in self.connections:
            connection.traffic = Traffic()  # without the messages of connecting
        workers = [fake.worker for fake in self.engines]
        self.fleet = RolloutClient(workers, SamplingConfig(max_tokens=size.tokens), seed=0)
        draws = Draws(size.prompts)
        self._kept_s = 0.0
        keep = self.ledger.keep
        self.ledger.keep = lambda step, completions: self._keep(keep, step, completions)  # type: ignore[method-assign]
        self.buffer = RolloutBuffer(self.fleet, self.ledger, draws, size.group, steps, 0)  # type: ignore[arg-type]
        info = TrainerInfo(
            rank=0, world=size.ranks, device="cpu", compute_dtype="float32", packing="forest", packing_reason="",
            context_length=1024, parameters=[], reference=False, optimizer_step=0,
        )  # fmt: skip
        self.policy = TrainerGroup([fake.worker for fake in self.ranks], [info], ROLE)

    def _fakes(self, name: str, role: str, count: int) -> list[FakeWorker]:
        side_by_side = self.size.per_node or 1
        nodes = [make_node(f"{role}-{first}") for first in range(0, count, side_by_side)]
        return [
            FakeWorker(self.account, WorkerSpec(f"{name}-{rank}", role, rank, "none:None"), nodes[rank // side_by_side])
            for rank in range(count)
        ]

    def step(self, step: int) -> dict[str, float]:
        """One step of GRPO; CPU seconds by part."""
        account, size = self.account, self.size
        account.spent.clear()
        self._kept_s = 0.0
        with account.part("submit"):
            self.buffer.request(step)
        generating = threading.Thread(target=self._generate, args=(step,), daemon=True)
        generating.start()
        with account.part("collect"):
            rollouts = self.buffer.take(step, size.prompts)
            waits.join(generating, waits_for="generation", why="its end", timeout_s=60.0)
        with account.part("progress"):
            self.fleet.counters()
        with account.part("pack"):
            batch = self._packed(rollouts)
            minibatches = list(batch.minibatches(1, None, ROLE.objective, max_tokens=size.tokens))
        with account.part("step"):
            stats = [self.policy.step(minibatch) for minibatch in minibatches]
        with account.part("metrics"):
            row = update_metrics(stats) | self.buffer.metrics(step)
        with account.part("rollout metrics"):
            row |= rollout_metrics(rollouts)
        with account.part("write_weights"):
            self.policy.write_weights(step + 1)
        with account.part("load_weights"):
            self.fleet.load_weights(Here(), step + 1)
        return dict(account.spent) | {"keep": self._kept_s}

    def _packed(self, rollouts: Rollouts) -> "object":
        for group in rollouts.groups:
            group.rewards = np.zeros(len(group.completions), np.float32)
        trees = forest_from_rollouts(rollouts, np.linspace(-1, 1, self.size.group)[None].repeat(self.size.prompts, 0))
        return pack(trees, self.size.ranks, 4096, "forest")

    def _keep(self, keep: Callable[[int, Sequence[Completion]], None], step: int, given: Sequence[Completion]) -> None:
        """Makes completions durable: work on the samples, which is counted by itself."""
        began = time.thread_time_ns()
        keep(step, given)
        self._kept_s += (time.thread_time_ns() - began) / 1e9
        self.account.beside(began)

    def _generate(self, step: int) -> None:
        """Completions come within `over_s`, in a random order of engines."""
        cpu = time.thread_time_ns()
        due = [(fake, request) for fake in self.engines for request in fake.requests]
        random.Random(step).shuffle(due)
        began = time.monotonic()
        held: deque[tuple[float, FakeWorker]] = deque()
        for number, (fake, request) in enumerate(due):
            fake.finish(completion_of(request, self.size.tokens, step))
            held.append(((time.monotonic() // MAX_HOLD_S + 1) * MAX_HOLD_S, fake))
            while held and held[0][0] <= time.monotonic():
                held.popleft()[1].tell()
            ahead = began + self.over_s * number / len(due) - time.monotonic()
            if ahead > 0.001:
                self._flush_relays()
                waits.sleep(ahead, "the next completion")
        waits.sleep(DELAY_S, "results that relays hold back")
        self._flush_relays()
        for fake in self.engines:
            fake.requests.clear()
        self.account.beside(cpu)

    def _flush_relays(self) -> None:
        now = time.monotonic()
        for each in self.engine_connections:
            each.relay_due(now)

    def traffic(self) -> Traffic:
        """All messages so far."""
        each = [connection.traffic for connection in self.connections]
        return Traffic(*(sum(getattr(of, name) for of in each) for name in Traffic.__dataclass_fields__))

    def calls(self) -> dict[str, int]:
        """Calls to all workers so far, by method."""
        found: dict[str, int] = {}
        for fake in [*self.engines, *self.ranks]:
            for name, count in fake.calls.items():
                found[name] = found.get(name, 0) + count
        return found

    def close(self) -> None:
        self.ledger.close()


Measured = tuple[dict[str, float], dict[str, int], Traffic]
"""CPU seconds of a step by part; calls and messages of all steps."""


def measure(sizes: Sequence[Size], steps: int, over_s: float) -> list[Measured]:
    """Medians over all steps but the first. The sizes take turns, so that the machine's load is the same for all."""
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as scratch, infrequent_gc():
        worlds = [World(size, Path(scratch) / f"run-{at}", steps + 1, over_s) for at, size in enumerate(sizes)]
        spent: list[list[dict[str, float]]] = [[] for _ in worlds]
        for step in range(steps + 1):
            for world, of in zip(worlds, spent, strict=True):
                found, traffic = world.step(step), world.traffic()
                sockets = socket_s(traffic) / (step + 1)
                bare = bare_of(world, traffic, step + 1)
                of.append(found | {"sockets": sockets} | dict(zip(BARE, bare, strict=True)))
        measured = []
        for world, of in zip(worlds, spent, strict=True):
            medians = {name: statistics.median(each[name] for each in of[1:]) for name in of[0]}
            measured.append((medians, world.calls(), world.traffic()))
            world.close()
    return measured


def bare_of(world: World, traffic: Traffic, steps: int) -> tuple[float, ...]:
    """The values of `BARE` for a step, of so many that this traffic had."""
    size, calls = world.size, world.calls()
    groups, all_calls = Groups(size.prompts, size.group, size.tokens), sum(calls.values())
    return (
        frames_s(traffic) / steps,
        heads_s(traffic) / steps,
        payloads_s(size.engines, groups, calls["collect"] // steps),
        objects_s(groups),
        calls_s(all_calls // steps, (traffic.sent + traffic.received) // steps, size.engines + size.ranks),
        routing_s(size.engines, groups),
    )


def coordination_s(spent: dict[str, float]) -> float:
    """CPU seconds that are spent because there are many workers."""
    return sum(spent[name] for name in COORDINATION)


def bare_total_s(spent: dict[str, float]) -> float:
    """The limit of `coordination_s` in CPU seconds."""
    return sum(spent[name] for name in BARE)


def table(size: Size, spent: dict[str, float]) -> list[str]:
    """Lines of Markdown."""
    nodes = f", {size.per_node} on each node behind a relay" if size.per_node else ", each connected by itself"
    lines = [
        f"{size.engines:,} engines, {size.ranks:,} trainer ranks, {size.prompts:,} prompts x {size.group} completions "
        f"of {size.tokens} tokens{nodes}",
        "",
        "| part | CPU ms a step |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {1e3 * value:.1f} |" for name, value in spent.items() if name not in BARE]
    coordination = coordination_s(spent)
    return [
        *lines,
        f"| **because of many workers** ({', '.join(COORDINATION)}) | **{1e3 * coordination:.1f}** |",
        f"| **all** | **{1e3 * sum(value for name, value in spent.items() if name not in BARE):.1f}** |",
        *(f"| {name}: {what} | {1e3 * spent[name]:.1f} |" for name, what in BARE.items()),
        f"| **bare, all together** | **{1e3 * bare_total_s(spent):.1f}** |",
        f"| **times the bare program** | **{coordination / bare_total_s(spent):.1f}** |",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--group", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--per-node", type=int, default=8, help="workers behind a call relay")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--over", type=float, default=2.0, metavar="SECONDS", help="in which completions come")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    options = parser.parse_args(arguments)
    found = {}
    workers = options.engines, options.ranks, options.group, options.tokens
    sizes = [Size(*workers, per_node) for per_node in dict.fromkeys((0, options.per_node))]
    for size, (spent, calls, traffic) in zip(sizes, measure(sizes, options.steps, options.over), strict=True):
        print("\n".join(table(size, spent)))
        print(f"\nin {options.steps + 1} steps: calls {calls}, messages {asdict(traffic)}\n")
        found["relayed" if size.per_node else "direct"] = {
            "size": asdict(size), "seconds": spent, "coordination": coordination_s(spent),
            "bare": bare_total_s(spent), "calls": calls,
            "messages": asdict(traffic),
        }  # fmt: skip
    if len(found) == 2:
        direct, relayed = (found[name]["coordination"] for name in ("direct", "relayed"))
        print(f"because of many workers, through relays: {relayed / direct:.2f} of what it is without")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
