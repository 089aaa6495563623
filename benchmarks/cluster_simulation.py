"""Simulates a run on 1,024 GPUs for months, event by event: which share of the time trains, and what each mechanism of
Lockstep adds to it.

    python -m benchmarks.cluster_simulation           writes the results and the plot of docs/endurance.md
    python -m benchmarks.cluster_simulation --seeds 4 --days 20 --print

How often nodes fail is published (`RATES`, `KINDS`). How long it takes to find a silent process and to restart a role
is measured: `benchmarks.endurance` writes it into its file, and this program reads it. What nobody has measured on such
a cluster with Lockstep is assumed (`Assumed`) and shown with the results. The simulation without mechanisms is checked
against Daly's closed form (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
FGCS 22, 2006), where that applies: failures that are seen at once, and a whole job that restarts.
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.runner import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "cluster-simulation.json"
MEASURED = ROOT / "benchmarks" / "results" / "cpu" / "endurance.jsonl"
PLOT = ROOT / "docs" / "images" / "cluster-simulation.svg"
HOUR, DAY = 3600.0, 86400.0
GPUS, PER_NODE = 1024, 8
NODES = GPUS // PER_NODE

RATES = {
    "Llama 3": 419 / 54 / (16384 / PER_NODE),
    "RSC-1": DAY / (7.9 * HOUR) / NODES,
    "RSC-2": 2.34e-3,
    "OPT-175B": (35 + 70) / 60 / (992 / PER_NODE),
}
"""Failures per node of eight GPUs and day. Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions in 54 days
on 16,384 GPUs. RSC-1 and RSC-2 (Kokolis et al., arXiv:2410.21680): a mean time to failure of 7.9 hours for jobs of
1,024 GPUs; 2.34 failures in 1,000 node-days. OPT-175B (arXiv:2205.01068, section 2.5): at least 35 manual and an
estimated 70 automatic restarts in two months on 992 GPUs."""

KINDS = {"host": 148 + 72 + 32 + 19 + 6 + 6 + 3 + 3 + 2 + 2 + 2 + 2, "silent": 35 + 17 + 7 + 7, "process": 54 + 2}
"""How many of Llama 3's 419 interruptions (table 5) were of each kind. `host`: the node has to be replaced (GPU, HBM,
maintenance, SRAM, silent data corruption, thermal, SSD, power supply, chassis, IO board, CPU, memory). `silent`:
nothing dies and the others wait (switch or cable, GPU system processor, NIC, NCCL watchdog). `process`: a process dies
on a healthy node (software, external dependency)."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What was not measured. Seconds."""

    step_s: float = 120.0
    checkpoint_every_s: float = 1800.0
    checkpoint_s: float = 30.0
    timeout_s: float = 1800.0
    """A collective's time-out, after which a silent failure is found without Lockstep (PyTorch's was 30 min)."""
    job_restart_s: float = 900.0
    """Of a whole job: scheduler, containers, imports, loading weights, building engines."""
    load_s: float = 120.0
    """Loading weights and state into a restarted role, on top of what was measured with tiny models."""
    repair_s: float = 4 * HOUR
    """Until another node takes the place of a broken one, where no spare one is part of the job."""
    join_s: float = 60.0
    """Until a spare node has joined."""
    spares: int = 4
    engine_nodes: int = NODES // 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, each one of a fault of the endurance benchmark."""

    silent: tuple[float, ...]
    """Until a verdict named a process that had stopped or held its interpreter lock."""
    trainer: tuple[float, ...]
    """Of a restart of all trainer ranks."""
    engine: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What the simulated program can do."""

    detection: bool = False
    by_role: bool = False
    snapshots: bool = False
    spares: bool = False


STEPS_UP = (
    ("none: time-out of 30 min, whole job restarts", Mechanisms()),
    ("+ detection within seconds", Mechanisms(detection=True)),
    ("+ recovery by role", Mechanisms(detection=True, by_role=True)),
    ("+ snapshots in memory", Mechanisms(detection=True, by_role=True, snapshots=True)),
    ("+ spare nodes: all", Mechanisms(True, True, True, True)),
)
LEFT_OUT = (
    ("all but detection", Mechanisms(False, True, True, True)),
    ("all but recovery by role", Mechanisms(True, False, True, True)),
    ("all but snapshots", Mechanisms(True, True, False, True)),
    ("all but spare nodes", Mechanisms(True, True, True, False)),
)


def measured(lines: Iterable[Mapping[str, Any]]) -> Measured:
    """The times in the file of the endurance benchmark. ValueError if it has none of a kind."""
    lines = list(lines)
    faults = [fault for line in lines for fault in line.get("faults", ())]
    silent = [f["named_s"] for f in faults if f["fault"].startswith(("stop ", "hold GIL")) and f["named_s"] is not None]
    restarts = []  # the first lines of the file have some twice: after a fault, and after the next one
    for line in lines:
        both = [(each["role"], each["seconds"]) for fault in line.get("faults", ()) for each in fault["restarts"]]
        restarts += dict.fromkeys(both)
    of = {role: [seconds for of_role, seconds in restarts if of_role == role] for role in ("policy", "rollout")}
    if not (silent and of["policy"] and of["rollout"]):
        raise ValueError(
            f"{MEASURED} has no detection of a silent process, or no restart of a trainer or an engine yet"
        )
    return Measured(tuple(silent), tuple(of["policy"]), tuple(of["rollout"]))


class Simulation:
    """A run of one training job. Its progress is that of synchronous reinforcement learning: every step needs all
    trainer nodes, and takes longer by the share of engine nodes that is missing."""

    def __init__(self, rate: float, can: Mechanisms, assumed: Assumed, times: Measured, seed: str) -> None:
        self.can, self.assumed, self.times = can, assumed, times
        self._chance, self._weather = random.Random(seed), random.Random(f"{seed} failures")
        self._rate_s = rate / DAY
        self._now = self._useful = self._saved = self._since_saved = 0.0
        self._down_until = 0.0
        self._broken = {"trainer": 0, "engine": 0}
        self._spares = assumed.spares if can.spares else 0
        self._events: list[tuple[float, int, str, str, float]] = []
        self._count = 0
        self.failures = 0

    def run(self, seconds: float) -> float:
        """The share of the time that trains."""
        for role, nodes in (("engine", self.assumed.engine_nodes), ("trainer", NODES - self.assumed.engine_nodes)):
            if nodes:
                self._next_failure(role, nodes)
        while self._events:
            at, _, what, role, repair_s = heapq.heappop(self._events)
            if at >= seconds:
                break
            self._advance(at)
            self._handle(what, role, repair_s)
        self._advance(seconds)
        return self._useful / seconds

    def _next_failure(self, role: str, nodes: int) -> None:
        """Failures come at the same times, and take as long to repair, whatever the program can do: so mechanisms can
        be compared."""
        kind = self._weather.choices(list(KINDS), weights=list(KINDS.values()))[0]
        repair_s = self._weather.expovariate(1 / self.assumed.repair_s)
        self._later(self._weather.expovariate(self._rate_s * nodes), kind, role, repair_s)

    def _later(self, seconds: float, what: str, role: str, repair_s: float = 0.0) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, what, role, repair_s))

    def _speed(self) -> float:
        """The part of full speed at which steps proceed."""
        if self._broken["trainer"]:
            return 0.0
        missing, engines = self._broken["engine"], self.assumed.engine_nodes
        if not missing:
            return 1.0
        return (engines - missing) / engines if self.can.by_role else 0.0

    def _advance(self, until: float) -> None:
        """Train until that time, except while the job is down, with checkpoints."""
        begin = min(max(self._now, self._down_until), until)
        self._now = until
        left, speed = until - begin, self._speed()
        every, cost = self.assumed.checkpoint_every_s, self.assumed.checkpoint_s
        while speed and left > 0:
            to_save = (every - self._since_saved) / speed
            if left < to_save:
                self._useful += left * speed
                self._since_saved += left * speed
                return
            self._useful += to_save * speed
            left -= to_save
            if left < cost:  # interrupted while it is written: the checkpoint before it counts
                self._since_saved = every
                return
            left -= cost
            self._saved, self._since_saved = self._useful, 0.0

    def _handle(self, what: str, role: str, repair_s: float) -> None:
        if what in KINDS:
            nodes = self.assumed.engine_nodes if role == "engine" else NODES - self.assumed.engine_nodes
            self._next_failure(role, nodes)
            self._fail(what, role, repair_s)
        elif what == "found":
            self._recover(role)
        elif what == "spare":
            self._spares += 1
        else:
            self._broken[role] -= 1
            if role == "trainer" or not self.can.by_role:
                self._down_until = max(self._down_until, self._now + self._restart_s(role))

    def _fail(self, kind: str, role: str, repair_s: float) -> None:
        """A node, or a process on it, fails."""
        self.failures += 1
        if kind == "silent":
            after_s = self._chance.choice(self.times.silent) if self.can.detection else self.assumed.timeout_s
            self._down_until = max(self._down_until, self._now + after_s)  # everybody waits
            self._later(after_s, "found", role)
        else:
            self._recover(role, repair_s if kind == "host" else 0.0)

    def _recover(self, role: str, repair_s: float = 0.0) -> None:
        """Restart what has to be restarted; a node that has to be repaired is replaced."""
        broken_host = repair_s > 0
        alone = role == "engine" and self.can.by_role
        if not alone:
            kept = self.can.snapshots and not broken_host  # a copy in the memory of a lost host is lost as well
            lost_s = min(self._since_saved, self.assumed.step_s * self._chance.random()) if kept else self._since_saved
            self._useful -= lost_s
            self._since_saved -= lost_s
        if broken_host:
            self._replace(role, repair_s)
        if not alone:
            self._down_until = max(self._down_until, self._now + self._restart_s(role))
        elif not broken_host:
            self._broken[role] += 1
            self._later(self._restart_s(role), "replaced", role)

    def _replace(self, role: str, repair_s: float) -> None:
        """Take a spare node, or wait for a repaired one. Repaired nodes become spares again."""
        self._broken[role] += 1
        if self._spares:
            self._spares -= 1
            self._later(self.assumed.join_s, "replaced", role)
            self._later(repair_s, "spare", role)
        else:
            self._later(repair_s, "replaced", role)

    def _restart_s(self, role: str) -> float:
        if not self.can.by_role:
            return self.assumed.job_restart_s
        return self._chance.choice(self.times.engine if role == "engine" else self.times.trainer) + self.assumed.load_s


def shares(rate: float, can: Mechanisms, assumed: Assumed, times: Measured, seeds: int, days: float) -> list[float]:
    """The share of each seed, in ascending order."""
    return sorted(Simulation(rate, can, assumed, times, f"{seed}").run(days * DAY) for seed in range(seeds))


def daly(mtbf_s: float, every_s: float, checkpoint_s: float, restart_s: float) -> float:
    """The share of the time that trains, by Daly's model: exponential failures, also during a restart."""
    whole = mtbf_s * math.exp(restart_s / mtbf_s) * (math.exp((every_s + checkpoint_s) / mtbf_s) - 1)
    return every_s / whole


def simulate(times: Measured, seeds: int, days: float) -> dict[str, Any]:
    """All results."""
    assumed = Assumed()
    rows = []
    for source, rate in RATES.items():
        for name, can in (*STEPS_UP, *LEFT_OUT):
            found = shares(rate, can, assumed, times, seeds, days)
            rows.append({"source": source, "mechanisms": name, "shares": [round(each, 5) for each in found]})
    return {
        "seeds": seeds, "days": days, "gpus": GPUS, "rates_per_node_day": RATES, "kinds": KINDS,
        "assumed": asdict(assumed), "measured": asdict(times), "rows": rows, "daly": check_daly(seeds, days),
    }  # fmt: skip


def check_daly(seeds: int, days: float) -> list[dict[str, float]]:
    """The simulation beside the closed form, where every failure is a process that dies and the job restarts."""
    rows = []
    for hours in (4.0, 8.0, 24.0):
        for every_s in (600.0, 1800.0, 5400.0):
            assumed = replace(Assumed(), checkpoint_every_s=every_s)
            found = plain_shares(hours * HOUR, assumed, seeds, days)
            closed = daly(hours * HOUR, every_s, assumed.checkpoint_s, assumed.job_restart_s)
            rows.append(
                {"mtbf_h": hours, "every_s": every_s, "simulated": round(statistics.mean(found), 5),
                 "error": round(statistics.stdev(found) / math.sqrt(len(found)), 5), "daly": round(closed, 5)}
            )  # fmt: skip
    return rows


def plain_shares(mtbf_s: float, assumed: Assumed, seeds: int, days: float) -> list[float]:
    """Shares with failures that need no other node and are seen at once."""

    class Plain(Simulation):
        def _fail(self, kind: str, role: str, repair_s: float) -> None:
            self._recover(role)

    none, rate = Measured((), (), ()), DAY / mtbf_s / NODES
    return [Plain(rate, Mechanisms(), assumed, none, f"plain {seed}").run(days * DAY) for seed in range(seeds)]


def table(found: Mapping[str, Any]) -> list[str]:
    """The tables of docs/endurance.md."""
    sources = list(found["rates_per_node_day"])
    hours = {name: 24 / (rate * NODES) for name, rate in found["rates_per_node_day"].items()}
    out = markdown_head("mechanisms", *(f"{name}: a failure in {hours[name]:.1f} h" for name in sources))
    rows = {(row["source"], row["mechanisms"]): row["shares"] for row in found["rows"]}
    for name in dict.fromkeys(row["mechanisms"] for row in found["rows"]):
        out.append(markdown(name, *(interval(rows[source, name]) for source in sources)))
    m = found["measured"]
    used = ", ".join(f"{name} {statistics.median(m[name]):.1f} s (of {len(m[name])})" for name in m)
    assumed = ", ".join(f"{name} {value:g}" for name, value in found["assumed"].items())
    out += ["", f"Median and 95 % of {found['seeds']} seeds, {found['days']:g} days each. Measured, medians: {used}."]
    out += ["", f"Assumed: {assumed}.", ""]
    out += markdown_head("failure every", "checkpoint every", "simulated", "Daly's closed form")
    for row in found["daly"]:
        simulated = f"{row['simulated']:.1%} ± {1.96 * row['error']:.1%}"
        out.append(markdown(f"{row['mtbf_h']:g} h", f"{row['every_s']:g} s", simulated, f"{row['daly']:.1%}"))
    return out


def interval(found: Sequence[float]) -> str:
    """Median, and the interval that holds 95 % of the seeds."""
    low, high = (found[round(q * (len(found) - 1))] for q in (0.025, 0.975))
    return f"{statistics.median(found):.1%} ({low:.1%} to {high:.1%})"


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Bars of the shares, one group for each source."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "lockstep"
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    sources = list(found["rates_per_node_day"])
    for number, (name, _) in enumerate(STEPS_UP):
        rows = [
            next(r["shares"] for r in found["rows"] if (r["source"], r["mechanisms"]) == (s, name)) for s in sources
        ]
        middle = [statistics.median(row) for row in rows]
        ends = [[statistics.median(row) - row[0] for row in rows], [row[-1] - statistics.median(row) for row in rows]]
        places = [place + 0.16 * (number - 2) for place in range(len(sources))]
        axes.bar(places, middle, 0.15, yerr=ends, label=name, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(sources)), sources)
    axes.set_ylabel("share of the time that trains")
    axes.set_ylim(0, 1)
    axes.set_title(f"{found['gpus']:,} simulated GPUs, failure rates of four published clusters")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--days", type=float, default=90.0)
    parser.add_argument("--print", action="store_true", help="write no files")
    options = parser.parse_args()
    lines = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    found = simulate(measured(lines), options.seeds, options.days)
    print("\n".join(table(found)))
    if not options.print:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        plot(found, PLOT)


if __name__ == "__main__":
    main()
