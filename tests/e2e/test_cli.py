"""The command line in real use: one run with all outputs, inspected during the run and afterwards."""

import json
import re
import subprocess
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from forked_controller import BOUND_S
from gated_rewards import Gate
from harness import LOCKSTEP, Launched, config, task, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lockstep import __version__
from lockstep.base.folders import run_shm_dir
from lockstep.cli import app
from lockstep.config.loader import check_config
from lockstep.ledger.ledger import Ledger
from lockstep.watch.beacon.reader import read_beacons

pytestmark = [pytest.mark.xdist_group("command line"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    {"kind": "function", "path": "examples/rewards.py:sorted_share"},
    {"kind": "function", "path": "examples/rewards.py:compute_score", "arguments": {"data_source": "digits"}},
    {"kind": "function", "path": "examples/rewards.py:reward_func", "weight": 0.5, "name": "openrlhf"},
]
GATED = 3
"""The number of steps after which the run is paused and inspected."""


def lockstep(*arguments: str, columns: int = 250) -> str:
    """Run a command that must succeed; returns its standard output."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def top_with(reason: str, run: Path) -> str:
    """The output of `lockstep top` once the controller's row shows a wait with this reason: a scorer may reach the gate
    before the controller has begun to wait for it, and the line below the table is looked at after the rows."""
    deadline = time.monotonic() + BOUND_S
    while not re.search(rf"^controller .*{reason}", table := lockstep("top", str(run), "--once"), re.MULTILINE):
        assert time.monotonic() < deadline, f"no process waits for {reason}:\n{table}"
    return table


@dataclass
class FinishedRun:
    """A finished run, and observations from when it was paused in the reward stage of a step."""

    run: Path
    values: dict[str, Any]
    printed: str
    top: str
    tops: dict[int, str]
    """The same on terminals of common widths."""
    pids: dict[str, int]
    live: dict[str, Any]
    report: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def finished(folder: Path) -> FinishedRun:
    gate = Gate(folder / "gate", GATED)
    values = config(
        folder, "grpo", name="seen", steps=4, report={"lines_every_s": 0}, reward={"terms": [*EXAMPLES, gate.term]}
    )
    run = Path(values["folder"]) / "seen"
    launched = Launched.start(run, str(write(folder, values)), cwd=ROOT, cold=True)
    try:
        gate.wait(GATED, launched)
        top = top_with("rewards of 4 terms", run)
        tops = {columns: lockstep("top", str(run), "--once", columns=columns) for columns in (80, 100, 120, 140)}
        pids = {state.name: state.pid for state in read_beacons((run / "run-id").read_text().strip())}
        assert lockstep("report", str(run)).strip() == str(run / "report.html")
        report = (run / "report.html").read_text()
        live = {name: (run / name).exists() for name in ("summary.json", "export")}
        gate.open(GATED)
        assert launched.finish() == 0, launched.text()
    finally:
        launched.kill()
    return FinishedRun(run, values, launched.printed(), top, tops, pids, live, report)


# ---------------------------------------------------------------- without a run


def test_help_names_every_command_and_option() -> None:
    text = lockstep("--help")
    assert all(word in text for word in ("train", "tiny", "top", "report", "--version"))
    assert lockstep("-h") == text
    assert all(word in lockstep("train", "--help") for word in ("FILE.yaml", "KEY=VALUE", "--resume", "--dry-run"))
    assert all(word in lockstep("tiny", "--help") for word in ("--alphabet", "--max-length", "--chat", "--seed"))
    assert "--once" in lockstep("top", "--help") and "RUN" in lockstep("report", "--help").upper()


def test_version() -> None:
    assert lockstep("--version") == f"lockstep {__version__}\n"


def test_an_unknown_command_or_option_is_refused() -> None:
    for arguments in (("trian", "x.yaml"), ("train", "--dryrun"), ("tiny",)):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "Usage" in result.stderr


def test_train_says_what_it_does_before_it_imports_anything_slow(folder: Path) -> None:
    """In a pipe, where nothing else was printed for ten seconds."""
    values = config(folder, "grpo", name="early", report={}, model={"path": str(folder / "missing")})
    command = [*LOCKSTEP, "train", str(write(folder, values)), "steps=1"]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first, first_s = process.stderr.readline(), time.monotonic() - began
        rest = process.stderr.read()
    total_s = time.monotonic() - began
    assert first == f"starting {values['folder']}/early (grpo, 1 step): loading libraries\n"
    assert "checking model, data and rewards" in rest and "refused" in rest and process.returncode == 2
    assert first_s < total_s / 3, (first_s, total_s)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_tiny_makes_a_model_that_transformers_loads(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "--max-length", "40"]
    text = lockstep("tiny", str(tmp_path / "m"), "--family", family, *sizes, "--alphabet", "abc", "--seed", "3")
    assert text == f"{tmp_path}/m: {family}, 2 layers, hidden size 32, seed 3\n"
    assert capfd.readouterr() == ("", ""), "transformers' progress bars are not shown"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert (model.config.model_type, model.config.max_position_embeddings) == (family, 40)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.decode(tokenizer("cab")["input_ids"]) == "cab"
    assert not tokenizer.chat_template


def test_tiny_refuses_sizes_and_folders(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for arguments, words in (
        (["m", "--hidden", "30"], "hidden: 30 with 4 heads"),
        (["m", "--family", "gpt"], "'gpt' is unknown, expected one of qwen2, llama"),
        (["full"], "has files, but holds no tiny model"),
    ):
        result = CliRunner().invoke(app, ["tiny", str(tmp_path / arguments[0]), *arguments[1:]])
        assert result.exit_code == 2 and words in result.stderr.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_dry_run_shows_what_would_be_started_and_starts_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = config(folder, "grpo", name="dry")
    file = str(write(folder, values))
    before, children = sorted(folder.rglob("*")), psutil.Process().children(recursive=True)
    text = lockstep("train", file, "--dry-run", "steps=7", "trainer.optimizer.lr=0.5")
    assert sorted(folder.rglob("*")) == before and psutil.Process().children(recursive=True) == children
    assert capfd.readouterr() == ("", "")
    resolved, _, plan = text.partition("\nprocesses")
    expected = {**values, "steps": 7, "trainer": {**values["trainer"], "optimizer": {"lr": 0.5}}}
    assert check_config(yaml.safe_load(resolved), "dry run") == check_config(expected, "here")
    for process in ("policy-0", "policy-1", "engine-0", "scorer-0"):
        assert re.search(rf"^{process} .* cpu ", plan, re.MULTILINE), plan
    for operation in ("all_gather", "reduce_scatter"):
        assert re.search(rf"^{operation} +fsdp +\d+ ", plan, re.MULTILINE), plan
    assert "M parameters, float32" in plan and "GiB in all" in plan and "shared memory for published weights" in plan


# ---------------------------------------------------------------- while it runs


def test_top_lists_every_process_with_its_stage_and_what_it_waits_for(finished: FinishedRun) -> None:
    rows = {line.split()[0]: line for line in finished.top.splitlines() if line and line.split()[0] != "process"}
    assert {"agent", "controller", "policy-0", "policy-1", "engine-0", "scorer-0"} <= rows.keys(), finished.top
    assert re.search(r"\breward\b", rows["controller"]) and "step 3/4" in rows["controller"]
    assert "the scorers" in rows["controller"] and "rewards of 4 terms" in rows["controller"]
    assert "scoring gate" in rows["scorer-0"]
    assert "tokens" in rows["engine-0"]
    assert "optimizer steps 3/4" in rows["policy-1"]
    assert re.search(r"controller waits for (the scorers|scorer-0)", finished.top.splitlines()[-1]), finished.top


def test_a_report_of_a_running_run_says_so(finished: FinishedRun) -> None:
    assert "still running, or killed" in finished.report
    assert "Reward by term" in finished.report, "curves of the steps so far"
    assert finished.live == {"summary.json": False, "export": False}


# ---------------------------------------------------------------- afterwards


def test_the_console_reports_steps_evaluations_and_folders(finished: FinishedRun) -> None:
    lines = finished.printed.splitlines()
    assert f"seen in {finished.run}" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert sum(line.startswith("evaluation after step ") for line in lines) == 3
    assert (
        lines[-1].startswith("finished after 4 of 4 steps in ") and f"report: {finished.run}/report.html" in lines[-1]
    )
    assert "\x1b" not in finished.printed and "it/s]" not in finished.printed, (
        "no colours and no progress bars in a log"
    )
    assert "Warning" not in finished.printed


def test_all_three_signatures_score_the_same_run(finished: FinishedRun) -> None:
    with Ledger.reader(finished.run) as ledger:
        rollouts = ledger.rollouts(3)
    assert rollouts is not None
    for group in rollouts.groups:
        truth = str(group.prompt.answer)
        for k, completion in enumerate(group.completions):
            answer = completion.text.strip()
            share = (
                sum(a == b for a, b in zip(answer, truth, strict=True)) / len(truth) if len(answer) == len(truth) else 0
            )
            exact = float(answer == truth)
            found = {name: float(values[k]) for name, values in group.breakdown.items()}
            assert found["sorted_share"] == pytest.approx(share)
            assert (found["compute_score"], found["openrlhf"]) == (exact, float(share == 1))
            assert found["compute_score/right_length"] == float(len(answer) == len(truth))
            assert (found["openrlhf/scores"], found["openrlhf/length"]) == (pytest.approx(share), len(completion.text))
            assert found["gate"] != found["gate"], "None: the term does not apply"
            assert group.rewards is not None
            assert group.rewards[k] == pytest.approx(share + exact + 0.5 * float(share == 1))


def test_summary(finished: FinishedRun) -> None:
    summary = json.loads((finished.run / "summary.json").read_text())
    assert (summary["name"], summary["recipe"], summary["exit_reason"]) == ("seen", "grpo", "finished")
    assert summary["steps"] == {"done": 4, "wanted": 4}
    exact = summary["eval/exact_match"]
    assert exact.keys() == {"first", "final", "best", "best_step"} and 0 <= exact["final"] <= exact["best"] <= 1
    assert summary["evaluation"]["eval/exact_match"] == exact["final"]
    assert {"rollout", "reward", "ledger", "pack", "logprobs", "train", "publish", "evaluate"} <= summary[
        "seconds"
    ].keys()
    assert summary["checkpoint"] == str(finished.run / "checkpoints" / "00000004")
    assert {"python", "torch", "transformers", "lockstep-rl"} <= summary["versions"].keys()
    rows = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    assert summary["tokens"] == sum(row.get("rollout/tokens", 0) for row in rows)
    with Ledger.reader(finished.run) as ledger:
        last = ledger.rollouts(3)
    assert last is not None
    generated = sum(len(completion.tokens) for group in last.groups for completion in group.completions)
    assert generated == summary["last"]["rollout/tokens"]


EXPECTED = {
    *("reward/mean", "reward/std", "rollout/groups_without_signal", "reward/sorted_share/mean"),
    *("rollout/length_mean", "rollout/truncated", "rollout/tokens"),
    *("policy/loss", "policy/entropy", "policy/clip_fraction", "policy/grad_norm", "policy/lr"),
    *("policy/engine_gap_mean", "policy/engine_gap_max", "time/rollout_s", "time/train_s", "throughput/tokens_per_s"),
}
"""Metrics of a step."""
MEASURED = {"policy/entropy", "policy/clip_fraction", "policy/engine_gap_mean", "policy/engine_gap_max"}
"""Those of the tokens that are learned: absent where no group has completions with different rewards."""


def test_metrics_lines(finished: FinishedRun) -> None:
    rows = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    evaluations = [row for row in rows if "eval/exact_match" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and [row["step"] for row in evaluations] == [0, 2, 4]
    assert any(row["policy/tokens"] for row in steps)
    for row in steps:
        missing = EXPECTED - row.keys()
        assert not missing if row["policy/tokens"] else missing <= MEASURED, "nothing learned, nothing measured"
    with Ledger.reader(finished.run) as ledger:
        for row, known in zip(steps, ledger.metrics_rows(), strict=True):
            present = EXPECTED & row.keys()
            assert {name: row[name] for name in present} == {name: known.values[name] for name in present}


@pytest.mark.slow
def test_nothing_is_measured_where_all_rewards_are_equal(tmp_path: Path) -> None:
    reward = {"terms": [{"kind": "regex", "pattern": "(?s).*"}]}
    values = config(task(tmp_path), "grpo", name="equal", steps=1, evaluation=None, reward=reward)
    launched = Launched.start(tmp_path / "runs/equal", str(write(tmp_path, values)))
    assert launched.finish() == 0, launched.text()
    rows = [json.loads(line) for line in (tmp_path / "runs/equal/metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "policy/loss" in row]
    assert row["rollout/groups_without_signal"] == 1.0 and row["policy/tokens"] == 0
    words = ("entropy", "ratio", "logprob", "clip", "engine_gap")
    assert [name for name in row if name.startswith("policy/") and any(word in name for word in words)] == []


def documented() -> tuple[set[str], set[str]]:
    """Names of metrics, and of files in a run's folder, in docs/run-folder.md."""
    text = (ROOT / "docs" / "run-folder.md").read_text()
    metrics: set[str] = set()
    for cell in re.findall(r"^\| (`[^|]+) \|", text.partition("## Metrics")[2], re.MULTILINE):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = section if name.startswith("/") else name.partition("/")[0]
            metrics.add(section + name if name.startswith("/") else name)
    files = re.findall(r"^      ([\w.-]+)/? ", text, re.MULTILINE)
    return metrics, set(files)


def test_every_metric_and_file_is_documented(finished: FinishedRun) -> None:
    metrics, files = documented()
    rows = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    found = {name for row in rows for name in row} - {"step", "time"}
    own = {name for name in found if name.startswith("reward/")} - metrics
    stages = {name for name in found if name.startswith("time/")} - metrics
    assert {"reward/<term>/mean", "reward/<term>/std", "reward/<term>/<key>", "time/<stage>_s"} <= metrics
    terms = {
        f"reward/{term}/{key}" for term in ("sorted_share", "compute_score", "openrlhf") for key in ("mean", "std")
    }
    assert own == terms | {"reward/compute_score/right_length", "reward/openrlhf/scores", "reward/openrlhf/length"}
    evaluated = {name for name in found if name.startswith("eval/reward/")}
    assert evaluated == {f"eval/{name}" for name in own}
    assert found - own - stages - evaluated <= metrics, found - own - stages - evaluated - metrics
    assert [path.name for path in sorted((finished.run / "steps").iterdir())][-1] == "00000004.arrow"
    there = {path.name for path in finished.run.iterdir()}
    elsewhere = {"incidents", "inputs", "reference", "devices.json", "timeline"}
    assert files - elsewhere == there - {"ledger.sqlite-wal", "ledger.sqlite-shm"}, "which SQLite creates for readers"


def test_tensorboard_reads_the_event_files(finished: FinishedRun) -> None:
    events = EventAccumulator(str(finished.run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= EXPECTED | {"eval/exact_match"}
    rows = [json.loads(line) for line in (finished.run / "metrics.jsonl").read_text().splitlines()]
    losses = [(row["step"], row["policy/loss"]) for row in rows if "policy/loss" in row]
    found = [(event.step, event.value) for event in events.Scalars("policy/loss")]
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
    assert [event.step for event in events.Scalars("eval/exact_match")] == [0, 2, 4]


class Page(HTMLParser):
    """Collects the addresses that a page would fetch, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.drawings: list[str] = re.findall(r"<svg\b.*?</svg>", text, re.DOTALL)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        wanted = [given.get(name) for name in ("src", "srcset", "data", "poster", "action", "xlink:href")]
        if tag != "a":
            wanted.append(given.get("href"))
        self.fetched += [value for value in wanted if value and not value.startswith(("#", "data:"))]


def test_the_report_is_one_self_contained_file(finished: FinishedRun) -> None:
    text = (finished.run / "report.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert "@import" not in text and not re.search(r"url\(\s*['\"]?(?!#|data:)", text), (
        "nothing is fetched by the style sheet"
    )
    assert len(page.drawings) > 10
    for drawing in page.drawings:
        ET.fromstring(drawing)
    for title in (
        *("Exact match on held-out prompts", "Reward by term", "Loss", "Entropy", "Completion length"),
        *("Clipped tokens", "Gradient norm", "Wasted", "Log-probability gap", "Throughput"),
    ):
        assert title in text, title
    assert "still running" not in text and "sorted_share" in text


def test_a_report_can_be_written_again(finished: FinishedRun) -> None:
    report = finished.run / "report.html"
    report.unlink()
    assert lockstep("report", str(finished.run)).strip() == str(report)
    assert Page(report.read_text()).fetched == [] and "finished" in report.read_text()


@pytest.mark.parametrize("columns", [80, 100, 120, 140])
def test_top_fits_the_terminal_and_loses_no_process(finished: FinishedRun, columns: int) -> None:
    lines = finished.tops[columns].splitlines()
    assert max(map(len, lines)) <= columns
    begins = [tuple(line.split()[:2]) for line in lines]
    assert {"controller", "policy-0", "policy-1", "engine-0", "scorer-0"} <= finished.pids.keys()
    assert all((name, str(pid)) in begins for name, pid in finished.pids.items()), "\n".join(lines)
    assert "  idle  " in next(line for line in lines if line.startswith("engine-0"))
    assert "waits for the scorers" in " ".join("".join(lines).split())
    assert not re.search(r" -\d", finished.tops[columns])


def test_top_of_a_finished_run_says_how_it_ended(finished: FinishedRun) -> None:
    text = lockstep("top", str(finished.run), "--once")
    assert "finished" in text and "4 of 4 steps" in text and str(finished.run) in text, text
    assert "Traceback" not in text


def test_no_process_of_the_run_is_left(finished: FinishedRun) -> None:
    identity = (finished.run / "run-id").read_text().strip()
    assert not run_shm_dir(identity).exists()


def test_the_exported_model_loads_and_generates(finished: FinishedRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished.run / "export")
    tokenizer = AutoTokenizer.from_pretrained(finished.run / "export")
    inputs = tokenizer("42=", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]
    assert tokenizer.decode(output[0]).startswith("42=")
    start = AutoModelForCausalLM.from_pretrained(finished.values["model"]["path"])
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved), "every weight was trained"
