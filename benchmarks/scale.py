"""What a step costs the controller of a run with a thousand engines and thousands of trainer ranks.

    python -m benchmarks.scale                                    1,024 engines, 4,096 ranks, 8 on each node
    python -m benchmarks.scale --engines 64 --ranks 256
    python -m benchmarks.scale --json benchmarks/results/cpu/scale.json

The real controller (buffer, engines, fleet, policy, packing, ledger, handles, messages, codec) drives workers that are
not there: they answer at once, completions come one by one in a random order of engines. Workers are connected each by
itself; behind one call relay for each node, as in small runs; and behind relays that nodes share, as in runs of so many
workers. The relays are real, without sockets. CPU time is counted, of all threads of the controller, without what the
workers' and the relays' side of this simulation takes. Sockets are counted by themselves: what frames of the mean size
take over loopback, system calls included, times the frames of a step. The limit of each part is measured in the same
run: what a minimal program takes for the same messages, samples and calls (`benchmarks.scale_bounds`).
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.fake_workers import (
    Account,
    FakeWorker,
    Traffic,
    completion_of,
    connect_all,
    make_node,
)
from benchmarks.scale_bounds import Exchange, Work, limits, socket_s
from lockstep.base import waits
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import Worker, WorkerSpec
from lockstep.cluster.relay_groups import RelayGroups
from lockstep.cluster.rpc.call_relay import DELAY_S
from lockstep.config.algorithm import PPOClip
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.micro_batch import MiniBatch
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

COORDINATION = {
    "submit": "requests to engines",
    "collect": "completions in a random order of engines",
    "progress": "counters of all engines, once",
    "load_weights": "all engines",
    "step": "its rows to each rank, and the answers",
    "write_weights": "all ranks",
    "metrics": "of the step",
    "sockets": "codes and system calls of all messages",
}
"""Parts that exist because there are many workers; the others are work on the samples themselves."""
ITEMS = {
    "frames": "plain writes and reads of all messages, authenticated",
    "calls": "each numbered, encoded, kept until it is answered, acknowledged; its workers and their progress known",
    "requests": "made with ids and seeds, given to the engine with the fewest, encoded, remembered",
    "completions": "decoded and checked, an object with its arrays for each, each taken once, the oldest version found",
    "counters": "of each engine decoded",
    "rows": "of the ranks of each message cut out of the columns",
}
GOAL_S = 0.1
"""Of the parts of `COORDINATION` together."""


@dataclass(frozen=True, slots=True)
class Size:
    engines: int
    ranks: int
    group: int
    tokens: int
    """Of a completion."""
    per_node: int = 8
    """Workers of a node."""
    relays: Literal["none", "separate", "shared"] = "shared"
    """Whether nodes have call relays, each its own or one for several nodes."""

    @property
    def text(self) -> str:
        samples = f"{self.prompts:,} prompts x {self.group} completions of {self.tokens} tokens"
        return f"{self.engines:,} engines, {self.ranks:,} trainer ranks, {samples}"

    @property
    def prompts(self) -> int:
        """As many as give every rank a completion, and every engine a group."""
        return max(self.engines, self.ranks // self.group)


ROLE = TrainRole(
    name="policy", model=ModelConfig(path="none"), trainer=TrainerConfig(), objective=PPOClip(), optimizer_steps=1
)


class Draws:
    """Prompts without data, made beside what is counted: in a run they come from the data."""

    def __init__(self, per_step: int, account: Account) -> None:
        self.per_step, self._account = per_step, account

    def draw(self, step: int, round: int = 0, count: int | None = None) -> list[Prompt]:
        began = time.thread_time_ns()
        tokens = np.arange(5, 37, dtype=np.int32)
        prompts = [Prompt(f"{step}:{row}", row, tokens, "p") for row in range(self.per_step)]
        self._account.beside(began)
        return prompts


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
        self._groups: RelayGroups[ClusterNode] = RelayGroups()
        self.engines = self._fakes("engine", "rollout", size.engines)
        self.ranks = self._fakes("policy", "policy", size.ranks)
        self.connections = connect_all([*self.engines, *self.ranks], size.relays != "none")
        self.account.network.settle()
        for connection in self.connections:
            connection.traffic = Traffic()  # without the messages of connecting
        workers = [fake.worker for fake in self.engines]
        self.fleet = RolloutClient(workers, SamplingConfig(max_tokens=size.tokens), seed=0)
        draws = Draws(size.prompts, self.account)
        self._kept_s, self._steps = 0.0, 0
        self.minibatches: list[MiniBatch] = []
        """Of the last step."""
        self.exchanged: dict[str, Exchange] = {}
        """By part of a step."""
        keep = self.ledger.keep
        self.ledger.keep = lambda step, completions: self._keep(keep, step, completions)  # type: ignore[method-assign]
        self.buffer = RolloutBuffer(self.fleet, self.ledger, draws, size.group, steps, 0)  # type: ignore[arg-type]
        info = TrainerInfo(
            rank=0, world=size.ranks, device="cpu", compute_dtype="float32", packing="forest", packing_reason="",
            context_length=1024, parameters=[], reference=False, optimizer_step=0,
        )  # fmt: skip
        self.policy = TrainerGroup([fake.worker for fake in self.ranks], [info], ROLE)

    def _fakes(self, name: str, role: str, count: int) -> list[FakeWorker]:
        per_node = self.size.per_node
        nodes = [make_node(f"{role}-{first}") for first in range(0, count, per_node)]
        for node in nodes:
            node.calls = self._groups.place(node, per_node, self.size.relays == "shared").calls
        return [
            FakeWorker(self.account, WorkerSpec(f"{name}-{rank}", role, rank, "none:None"), nodes[rank // per_node])
            for rank in range(count)
        ]

    def step(self, step: int) -> dict[str, float]:
        """One step of GRPO; CPU seconds by part."""
        account, size = self.account, self.size
        account.spent.clear()
        self._kept_s = 0.0
        with self._part("submit"):
            self.buffer.request(step)
        generating = threading.Thread(target=self._generate, args=(step,), daemon=True)
        generating.start()
        with self._part("collect"):
            rollouts = self.buffer.take(step, size.prompts)
            waits.join(generating, waits_for="generation", why="its end", timeout_s=60.0)
        with self._part("progress"):
            self.fleet.counters()
        with account.part("pack"):
            batch = self._packed(rollouts)
            self.minibatches = list(batch.minibatches(1, None, ROLE.objective, max_tokens=size.tokens))
        with self._part("step"):
            stats = [self.policy.step(minibatch) for minibatch in self.minibatches]
        with account.part("metrics"):
            row = update_metrics(stats) | self.buffer.metrics(step)
        with account.part("rollout metrics"):
            row |= rollout_metrics(rollouts)
        with self._part("write_weights"):
            self.policy.write_weights(step + 1)
        with self._part("load_weights"):
            self.fleet.load_weights(Here(), step + 1)
        self._steps += 1
        return dict(account.spent) | {"keep": self._kept_s}

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A part that exchanges messages with workers, which are counted in the first step."""
        before = None if self._steps else (self.traffic(), sum(self.calls().values()))
        with self.account.part(name):
            yield
        if before is not None:
            now, calls = self.traffic(), sum(self.calls().values()) - before[1]
            # Engines are asked for completions together with their requests, and answer later.
            calls += {"submit": -self.size.engines, "collect": self.size.engines}.get(name, 0)
            sent, received = now.sent - before[0].sent, now.received - before[0].received
            self.exchanged[name] = Exchange(sent, received, calls)

    def limits(self) -> dict[str, dict[str, float]]:
        """The limit of each part of a step, in CPU seconds, by what they are spent on; measured now."""
        size, traffic = self.size, Traffic(*(count // self._steps for count in astuple(self.traffic())))
        (minibatch,) = self.minibatches
        work = Work(size.engines, size.prompts, size.group, size.tokens, minibatch.encode())
        return limits(work, self.exchanged, traffic)

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
            held.append(((time.time() // MAX_HOLD_S + 1) * MAX_HOLD_S, fake))
            while held and held[0][0] <= time.time():
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
        for each in self.connections:
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


def measure(sizes: Sequence[Size], steps: int, over_s: float) -> list[dict[str, Any]]:
    """Medians over all steps but the first. The sizes take turns, so that the machine's load is the same for all."""
    with tempfile.TemporaryDirectory(prefix="lockstep-scale-") as scratch, infrequent_gc():
        worlds = [World(size, Path(scratch) / f"run-{at}", steps + 1, over_s) for at, size in enumerate(sizes)]
        spent: list[list[dict[str, float]]] = [[] for _ in worlds]
        least: list[list[dict[str, dict[str, float]]]] = [[] for _ in worlds]
        for step in range(steps + 1):
            for world, seconds, of in zip(worlds, spent, least, strict=True):
                found = world.step(step)
                seconds.append(found | {"sockets": socket_s(world.traffic()) / (step + 1)})
                of.append(world.limits())
        measured = []
        for world, seconds, of in zip(worlds, spent, least, strict=True):
            measured.append(
                {
                    "size": asdict(world.size),
                    "steps": steps + 1,
                    "seconds": {name: statistics.median(each[name] for each in seconds[1:]) for name in seconds[0]},
                    "limits": {
                        part: {item: statistics.median(each[part][item] for each in of[1:]) for item in items}
                        for part, items in of[0].items()
                    },
                    "calls": world.calls(),
                    "messages": asdict(world.traffic()),
                    "connections": len(world.connections),
                    "relay": max(each.relay_ns for each in world.connections) / 1e9 / (steps + 1),
                }
            )
            world.close()
    return measured


def coordination_s(found: Mapping[str, Any]) -> float:
    """CPU seconds that are spent because there are many workers."""
    return sum(found["seconds"][name] for name in COORDINATION)


def limit_s(found: Mapping[str, Any]) -> float:
    """The limit of `coordination_s`."""
    return sum(sum(items.values()) for items in found["limits"].values())


def title(found: Mapping[str, Any]) -> str:
    """How the workers are connected."""
    size = found["size"]
    if not relayed(found):
        return "each by itself"
    return f"{(size['engines'] + size['ranks']) // found['connections']} behind each relay"


def relayed(found: Mapping[str, Any]) -> bool:
    """Whether the workers are called through relays."""
    return bool(found["size"]["relays"] != "none")


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: CPU milliseconds of a step by part, beside their limits, and what these consist of.

    Args:
        results: what `measure` returns for each way in which workers are connected, by `title`.
    """
    of = list(results.values())

    def line(name: str, seconds: Iterable[float], mark: str = "") -> str:
        return f"| {name} | {' | '.join(f'{mark}{1e3 * each:.1f}{mark}' for each in seconds)} |"

    def beside(value: Callable[[Any], float], limit: Callable[[Any], float]) -> list[float]:
        return [each for found in of for each in (value(found), limit(found))]

    def both(part: str) -> list[float]:
        return beside(lambda found: found["seconds"][part], lambda found: sum(found["limits"].get(part, {}).values()))

    def of_item(item: str) -> list[float]:
        return [sum(items.get(item, 0.0) for items in found["limits"].values()) for found in of]

    titles = list(results)
    items = dict.fromkeys(item for found in of for part in found["limits"].values() for item in part)
    return [
        f"| part | {' | '.join(f'{title} | its limit' for title in titles)} |",
        f"| --- |{' --- |' * 2 * len(of)}",
        *(line(f"{part}: {what}", both(part)) for part, what in COORDINATION.items()),
        line(f"**because of many workers** (goal: {1e3 * GOAL_S:.0f})", beside(coordination_s, limit_s), "**"),
        "",
        f"| what the limits consist of | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(of)}",
        *(line(f"{item}: {ITEMS[item]}", of_item(item)) for item in items),
        line("**limit of a step**", map(limit_s, of), "**"),
        line("a step / its limit", (1e-3 * coordination_s(found) / limit_s(found) for found in of)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--group", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--per-node", type=int, default=8, help="workers of a node")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--over", type=float, default=2.0, metavar="SECONDS", help="in which completions come")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    options = parser.parse_args(arguments)
    workers = options.engines, options.ranks, options.group, options.tokens, options.per_node
    sizes = [Size(*workers, "none"), Size(*workers, "separate"), Size(*workers, "shared")]
    measured = measure(sizes, options.steps, options.over)
    results = {title(found): found for found in measured}
    print(sizes[0].text, "\n".join(table(results)), sep="\n\n")
    for name, found in results.items():
        own = ", ".join(f"{part} {1e3 * s:.1f}" for part, s in found["seconds"].items() if part not in COORDINATION)
        print(f"\n{name}: work on the samples themselves {own}; in {found['steps']} steps {found['calls']}", end=", ")
        print(found["messages"], f"on {found['connections']:,} connections", end="")
        print(f"; a relay's own work, without sockets, at most {1e3 * found['relay']:.2f} ms a step" * relayed(found))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
