"""The speed of `lockstep explain` on logs: `python -m benchmarks.log_reading [--megabytes N]`. Prints a table.

A generated training log in which a rule matches every 1000th line is read from disk by the full pipeline (blocks,
prefilter, rules, prefixes, times, history, judge), by the prefilter alone, by `grep -E` with the same signatures, and
by installed libraries that could replace the prefilter. Seconds are CPU seconds, so other load matters little; the last
column is each side's time over that of the full pipeline."""

import argparse
import importlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.logs.log_lines import split_pages
from lockstep.doctor.logs.prefilter import Prefilter

BLOCK = 4 << 20
EVERY = 1000
_LINE = (
    "[default{rank}]:2026-11-21 14:{minute:02d}:{second:02d},{ms:03d} train - INFO - step: {step} loss: {loss:.4f} "
    "grad_norm: 0.61 memory: 28.63GiB(35.79%) tps: 5,230"
)
_MATCHED = "[default3]:[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered"


def lines(count: int) -> Iterator[str]:
    """A log of 8 ranks; a rule matches every 1000th line."""
    for at in range(count):
        if at % EVERY == EVERY // 2:
            yield _MATCHED
        else:
            second = at // 80
            yield _LINE.format(rank=at % 8, minute=second // 60 % 60, second=second % 60, ms=at % 1000, step=at // 8,
                               loss=2.0 - at % 97 / 97)  # fmt: skip


def seconds(work: Callable[[], object], times: int) -> float:
    """The smallest CPU seconds of some runs, child processes included."""

    def spent() -> float:
        so_far = os.times()
        return time.process_time() + so_far.children_user + so_far.children_system

    best = float("inf")
    for _ in range(times):
        before = spent()
        work()
        best = min(best, spent() - before)
    return best


def extended(pattern: str) -> str | None:
    """A signature in the syntax of `grep -E`; None if it uses features that grep lacks, such as lookahead."""
    plain = re.sub(r"\(\?P<\w+>", "(", pattern).replace("(?:", "(").replace(r"\d", "[0-9]")
    plain = re.sub(r"(?<=[*+}?])\?", "", plain)
    return None if re.search(r"\(\?|\\[ADZnt]", plain) else plain


def grep(patterns: Iterable[str], path: Path, folder: Path, *options: str) -> Callable[[], object]:
    """`grep -E` of all patterns at once, in the C locale, counting lines."""
    wanted = folder / f"patterns{len(list(folder.iterdir()))}"
    wanted.write_text("".join(f"{each}\n" for each in patterns))
    words = ["grep", "-E", "-c", *options, "-f", str(wanted), str(path)]

    def run() -> None:
        done = subprocess.run(words, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False)
        if done.returncode > 1:
            raise SystemExit(done.stderr)

    return run


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def others(texts: list[str], path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Installed libraries that could replace the prefilter."""
    found: dict[str, Any] = {}
    for name in ("hyperscan", "ahocorasick"):
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            continue
    if "hyperscan" in found:
        database = found["hyperscan"].Database()
        database.compile(expressions=[re.escape(each).encode() for each in texts], ids=list(range(len(texts))),
                         flags=[found["hyperscan"].HS_FLAG_CASELESS] * len(texts))  # fmt: skip
        yield "hyperscan", lambda: [database.scan(each, match_event_handler=lambda *_: None) for each in blocks(path)]
    if "ahocorasick" in found:
        automaton = found["ahocorasick"].Automaton()
        for at, each in enumerate(texts):
            automaton.add_word(each, at)
        automaton.make_automaton()
        yield "pyahocorasick", lambda: [sum(1 for _ in automaton.iter(each.lower().decode("latin1")))
                                        for each in blocks(path)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        length = len(next(lines(1))) + 1
        with path.open("w") as file:
            file.writelines(line + "\n" for line in lines(asked.megabytes * 1_000_000 // length))
        size = path.stat().st_size / 1e6
        rules = load_knowledge()
        prefilter = Prefilter(rules.by_literal)
        texts = sorted(rules.by_literal)
        signatures = [each for rule in rules.rules for each in rule.signature.all_patterns]
        read = [each for each in map(extended, signatures) if each is not None]
        literal = [re.sub(r"[][.*+?(){}|^$\\]", r"\\\g<0>", each) for each in texts]
        rows: list[tuple[str, Callable[[], object]]] = [
            ("full pipeline", lambda: explain([str(path)])),
            (
                "prefilter (ahocorasick_rs)",
                lambda: [list(prefilter.candidates(each)) for each in split_pages(blocks(path))],
            ),
            ("grep -E -i, the same texts", grep(literal, path, Path(folder), "-i")),
            (f"grep -E, {len(read)} of {len(signatures)} signatures", grep(read, path, Path(folder))),
            *others(texts, path),
        ]
        print(f"{size:.0f} MB, {len(rules.rules)} rules, {len(texts)} texts, one line in {EVERY} matches")
        pipeline_s = 0.0
        for name, work in rows:
            spent = seconds(work, asked.times)
            pipeline_s = pipeline_s or spent
            print(f"{name:<36} {size / spent:7.0f} MB/s   {spent:6.2f} s   {spent / pipeline_s:5.2f}")


if __name__ == "__main__":
    main()
