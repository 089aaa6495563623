"""The corpus of jobs that ran is what its makers say: truth, sizes, no trace of the machine."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.case_corpus import read_corpus
from benchmarks.job_makers.make_jobs import MOST_BYTES, RAN, ROOT, Job, all_jobs, neutral

MADE = {each.name for each in (RAN / "jobs").iterdir()}
JOBS = {job.name: job for job in all_jobs() if job.name in MADE}
"""The jobs that were made; an entry may wait for its first run."""
CLASSES = {each.stem for each in (ROOT / "src/lockstep/doctor/knowledge/data").glob("*.yaml")} - {"facts"}


def folder(name: str) -> Path:
    return RAN / "jobs" / name


def test_every_job_of_the_corpus_has_the_truth_of_its_entry() -> None:
    truth = json.loads((RAN / "truth.json").read_text())
    assert truth == {name: job.truth for name, job in JOBS.items()}
    assert len(read_corpus(RAN)) == len(JOBS) == len(MADE)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_job_is_small_and_shows_no_machine(job: Job) -> None:
    files = [each for each in folder(job.name).rglob("*") if each.is_file()]
    assert 80 <= sum(each.stat().st_size for each in files) <= MOST_BYTES
    text = "\n".join(each.read_text(errors="replace") for each in files)
    assert re.search(r"/trees/|/root/|job_makers|JOB_OF_CORPUS", text) is None
    assert {job.cls, *job.also} <= CLASSES, "a class that FAILURES.md does not know"


def test_paths_hosts_and_addresses_are_replaced(tmp_path: Path) -> None:
    text = f'File "{tmp_path}/train.py"\nFile "{tmp_path}/venv/lib/x.py"\n  host      : localhost\n/root/a'
    said = neutral(text, tmp_path, tmp_path / "venv", "", seed=3, node=4)
    assert str(tmp_path) not in said
    assert "localhost" not in said
    assert "/root/" not in said
