"""What `lockstep explain --redact` shows as page, JSON and text has the substitutes of the bundle, no private name."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.doctor.job_logs import raised, steps, watchdog, write

TOKEN = "hf_Zq83kf02LmPwX71vBn45TyUc9a"
PRIVATE = re.compile(rf"(?i)dgx-a1|anna|schmidt|acme|titan|10\.77\.3|{TOKEN}")
FRAMES = (
    ("/lustre/acme/users/anna.schmidt/titan/train.py", 12, "main", "score(batch)"),
    ("/lustre/acme/users/anna.schmidt/titan/rewards.py", 7, "score", 'open("s3://acme-ckpts/titan/answers.json")'),
)
JOB = {
    "dgx-a17_rank_0": [
        "2026-11-21 14:09:59,000 [rank 0] INFO anna.schmidt@dgx-a17 runs /home/anna.schmidt/titan/t.py at 10.77.3.9",
        *steps(0, 60),
        *watchdog(0, 7),
    ],
    "dgx-a18_rank_1": [
        f"HF_TOKEN={TOKEN}",
        "2026-11-21 14:09:59,000 [rank 1] WARNING NCCL WARN connect to dgx-a17.acme.com:29501 failed, retrying",
        *steps(1, 60),
        *raised(1, "FileNotFoundError: [Errno 2] s3://acme-ckpts/titan/answers.json of dgx-a18", *FRAMES),
    ],
    "dgx-a19_rank_2": [*steps(2, 60), *watchdog(2, 7)],
}


RULES = """
class: storage_fault
title: The store of answers was emptied
explanation: The answers are gone.
fix: Upload them.
signatures:
  - id: our-answers-gone
    pattern: 'answers were lost by our store'
    role: cause
    strength: 0.99
    fatal: true
    examples: ['answers were lost by our store']
    not: ['answers were found']
    sources: ['https://example.org/ours']
"""


def explain(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "explain", *map(str, arguments)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "acme-titan", **JOB))


def test_page_json_and_text_name_what_the_bundle_names(logs: Path, tmp_path: Path) -> None:
    page, bundle = tmp_path / "page.html", tmp_path / "bundle.zip"
    plain = explain(logs, "--html", page)
    assert PRIVATE.search(page.read_text()) and PRIVATE.search(plain.stdout), "without --redact the names stay"
    done = explain(logs, "--redact", bundle, "--html", page, "--json")
    shown, found = page.read_text(), json.loads(done.stdout)
    for text in (shown, done.stdout, done.stderr, explain(logs, "--redact", tmp_path / "again").stdout):
        assert not (PRIVATE.search(text) or str(logs) in text), text
    verdict = json.loads(explain(logs, "--json").stdout)
    assert (found["class"], found["confidence"]) == (verdict["class"], verdict["confidence"])
    assert [each["rank"] for each in found["culprits"]] == [each["rank"] for each in verdict["culprits"]] == [1]
    for text in ("A rank raised an exception", f"{verdict['confidence']:.2f}", "rank 1", "score() at rewards.py:7"):
        assert text in shown, text
    for rank in range(3):
        assert re.search(rf'aria-label="rank {rank}: [^"]*\b60 steps', shown), rank
    with zipfile.ZipFile(bundle) as archive:
        content = "\n".join([*archive.namelist(), *(archive.read(each).decode() for each in archive.namelist())])
    named = set(re.findall(r"(?:machine|bucket|folder|user)-\d+", shown))
    assert {"machine", "bucket"} <= {each.split("-")[0] for each in named}
    assert all(each in content for each in named)


def test_lines_cited_on_the_page_are_those_of_the_bundle(logs: Path, tmp_path: Path) -> None:
    done = explain(logs, "--redact", tmp_path / "bundle", "--json")
    cited = [each for each in json.loads(done.stdout)["evidence"] if each.get("line")]
    assert cited
    for each in cited:
        lines = (tmp_path / "bundle" / each["file"]).read_text().splitlines()
        assert each["text"][:60].strip() in lines[each["line"] - 1]


def test_files_given_one_by_one_are_named_without_their_folders(logs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = explain(*sorted(logs.iterdir()), "--redact", tmp_path / "bundle", "--html", page)
    assert not PRIVATE.search(page.read_text()) and not PRIVATE.search(done.stdout + done.stderr)


def test_the_page_of_a_refused_bundle_is_not_written(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    done = explain(logs, "--redact", tmp_path / "bundle", "--html", tmp_path / "page.html", "--json", code=2)
    assert not (tmp_path / "page.html").exists() and not done.stdout and "exists" in done.stderr


def test_rules_of_the_user_judge_the_bundle_too(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "own.yaml").write_text(RULES)
    job = write(tmp_path / "job", rank_0=[*steps(0, 20), "[rank0]: answers were lost by our store"])
    done = explain(job, "--rules", rules, "--redact", tmp_path / "bundle", "--json")
    assert json.loads(done.stdout)["class"] == "storage_fault" and "note:" not in done.stderr
    assert json.loads(explain(job, "--json").stdout)["class"] != "storage_fault"
