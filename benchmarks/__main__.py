"""Compares Lockstep with TRL and prints the table: `script/benchmark`, which installs TRL first.

    script/benchmark                             everything, five repeats: about 25 minutes on two quiet cores
    script/benchmark fixed tail                  some workloads
    script/benchmark preference                  DPO with prompts of 32 and 512 tokens
    script/benchmark preference floors           and the matrix products of the same tokens
    script/benchmark vision                      GRPO with images beside TRL: three minutes
    script/benchmark losses                      each step's loss beside TRL's other trainers: two minutes
    script/benchmark async                       not part of the full set: generation ahead of training, ten minutes
    script/benchmark ppo                         PPO beside GRPO, CPU time by stage and role: five minutes
    script/benchmark --table --out FOLDER        the table of the results in FOLDER, without measuring
    script/benchmark --quick                     one tiny repeat of everything, to see that it works

Every repeat is written to `FOLDER/raw.jsonl` at once. An interrupted run continues when it gets the same `--out`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import ppo_beside_grpo, step_losses
from benchmarks.docs_markers import into_page
from benchmarks.results import RAW, SETTINGS, TABLE, facts, read, report, settings
from benchmarks.runner import ROOT, Tell, environment, peer_installed, run, write
from benchmarks.staleness import run_ahead
from benchmarks.workloads import MODEL, TOY, WORKS, Side, Work, quick
from lockstep.models.tiny_model import TinyModel, make_tiny

GENERATION, FLOORS, ASYNC, LOSSES, PPO = "generation", "floors", "async", "losses", "ppo"
GROUPS = {"preference": [name for name, work in WORKS.items() if work.kind == "preference"]}
"""Names for several workloads."""
GENERATED = {"fixed": "p32-fixed", "tail": "p32-tail", "p512": "p512-fixed"}
"""The names of the rows of `benchmarks.generation` with the same prompts and lengths."""


def main() -> None:
    options = arguments()
    folder: Path = options.out or ROOT / "build" / "benchmark" / time.strftime("%Y%m%d-%H%M%S")
    works = [WORKS[name] for name in options.works if name in WORKS]
    if options.side:
        works = [replace(work, sides=tuple(side for side in work.sides if side.name in options.side)) for work in works]
    model = MODEL
    if options.quick:
        works, model = [quick(work) for work in works], TOY
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    if options.works == [PPO]:
        lines = ppo_beside_grpo.measure(folder, 1 if options.quick else options.repeats, tell, options.quick)
        print("\n".join(ppo_beside_grpo.table(lines)))
        return
    if not options.table:
        peers = any(side.program == "trl" for work in works for side in work.sides) or GENERATION in options.works
        if peers and not peer_installed():
            raise SystemExit("TRL is not in build/peer: use script/benchmark, which puts it there")
        if options.works == [LOSSES]:
            step_losses.main(folder, tell)
            return
        tell(f"results go to {folder}")
        if not (folder / RAW).exists():
            write(folder / RAW, {"made": facts()})
        text = json.dumps(settings(list(WORKS.values())), indent=2)
        (folder / SETTINGS).write_text(text.replace(f"{ROOT}/", "") + "\n")
        repeats = 1 if options.quick else options.repeats
        with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as scratch:
            run(works, repeats, Path(scratch), folder / RAW, tell, model)
            if FLOORS in options.works:
                measure_floors(works, folder, Path(scratch), tell, model)
            if GENERATION in options.works and not options.quick:
                measure_generation(folder, Path(scratch), tell, options.generation_repeats)
            if ASYNC in options.works:
                run_ahead(repeats, Path(scratch), folder / RAW, tell, small=options.quick)
    text = report(works if options.quick or options.side else list(WORKS.values()), read(folder))
    (folder / TABLE).write_text(text)
    if options.docs:
        into_page(options.docs, text)
    print(text)


def arguments() -> argparse.Namespace:
    everything = [*WORKS, FLOORS, GENERATION]
    known = [*everything, *GROUPS, ASYNC, LOSSES, PPO]
    parser = argparse.ArgumentParser(
        prog="script/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "works", nargs="*", metavar="WORK", help=f"of {', '.join(known)}; all up to {GENERATION} when none is given"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each side, in turns (default 5)")
    parser.add_argument("--generation-repeats", type=int, default=2, help="of generation alone (default 2)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: build/benchmark/DATE-TIME")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the tables into this page, between its markers")
    parser.add_argument("--side", action="append", metavar="NAME", help="only these sides of the workloads; repeatable")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="one tiny repeat")
    options = parser.parse_args()
    unknown = [name for name in options.works if name not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is no workload, expected some of {', '.join(known)}")
    if options.table and not options.out:
        parser.error("--table needs the --out of what was measured")
    if LOSSES in options.works and (len(options.works) > 1 or options.table or options.quick):
        parser.error(f"{LOSSES} is measured alone: leave out the other workloads, --table and --quick")
    if PPO in options.works and (len(options.works) > 1 or options.table):
        parser.error(f"{PPO} is measured alone: leave out the other workloads and --table")
    given = [work for name in options.works for work in GROUPS.get(name, [name])]
    options.works = list(dict.fromkeys(given)) or everything
    return options


def measure_floors(works: list[Work], folder: Path, scratch: Path, tell: Tell, model: TinyModel) -> None:
    """The matrix products of each workload's training step, in this process."""
    import torch  # only here, so that --help and --table are fast
    from transformers import AutoModelForCausalLM

    from benchmarks.matmul_baseline import training_floor

    torch.set_num_threads(1)
    lm = AutoModelForCausalLM.from_pretrained(make_tiny(scratch / "floor", model), dtype=torch.float32)
    for work in works:
        seconds = training_floor(lm, work)
        write(folder / RAW, {"floors": {"work": work.name, "training": seconds}})
        tell(f"floor of {work.name}: training {seconds:.3f} CPU s")


def measure_generation(folder: Path, scratch: Path, tell: Tell, repeats: int) -> None:
    """Compare the engine with `generate` of transformers and the floor, in a separate process."""
    tell("generation alone")
    target = scratch / "generation.json"
    side = Side(GENERATION, "lockstep")
    command = [sys.executable, "-m", "benchmarks.generation", "--models", "3M", "--json", str(target)]
    subprocess.run([*command, "--repeats", str(repeats)], env=environment(side), check=True, cwd=ROOT, timeout=1800)
    for row in json.loads(target.read_text()):
        write(folder / RAW, {"generation": row})
        for name, theirs in GENERATED.items():
            if row["work"] == theirs:
                write(folder / RAW, {"floors": {"work": name, "generation": row["floor"]}})


if __name__ == "__main__":
    main()
