"""Bundles and cases: the verdict stays, names and secrets go, nothing is overwritten."""

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.case_corpus import OWN_CASES, KnownCase, read_corpus
from lockstep.doctor.bundle.case_bundle import (
    MANIFEST,
    BundleRefused,
    _redactor_of,
    _sources,
    _texts,
    share_case,
    write_bundle,
)
from lockstep.doctor.output.job_answer import JobAnswer, answer_job
from lockstep.ledger import Ledger
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import raised, steps, waited, watchdog, write

TOKEN = "hf_Zq83kf02LmPwX71vBn45TyUc9a"
JOBS = {
    "exception of a rank": {
        "dgx-a17_rank_0": [*steps(0, 20), *watchdog(0, 7)],
        "dgx-a18_rank_1": [f"HF_TOKEN={TOKEN}", *steps(1, 20), *raised(1, "KeyError: 'answer'")],
    },
    "mismatch": {
        "rank_0": [*steps(0, 10), *waited(0, "all_reduce", line=54, function="reduce_grads")],
        "rank_1": [*steps(1, 10), *waited(1, "all_reduce", line=54, function="reduce_grads")],
        "rank_2": [*steps(2, 10), *waited(2, "barrier", line=12, function="save")],
    },
    "refused address": {
        "trainer-b09": [
            "2026-11-21 14:10:00,000 INFO anna.schmidt@trainer-b09 runs /home/anna.schmidt/train.py",
            "[W1121 14:12:00.1 socket.cpp:752] [c10d] The client socket has failed to connect to [10.77.3.9]:29500 "
            "(errno: 111 - Connection refused).",
            "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
            "connect to (10.77.3.9, 29500).",
        ],
    },
    "healthy": {"gpu-c31": [*steps(0, 50), "2026-11-21 14:20:00,000 INFO Training completed"]},
}  # fmt: skip


def answer_of(folder: Path, job: str) -> JobAnswer:
    return answer_job([write(folder, **JOBS[job])])


def named(verdict: Verdict, answer: JobAnswer | None = None) -> tuple[str, list[tuple[str, ...]]]:
    """Class and culprits; those of the original in the names of the bundle."""
    rename = str
    if answer is not None:
        redactor = _redactor_of(answer)
        texts = list(_texts(_sources(answer)[0], []))
        for _, text in texts:
            redactor.learn(text)
        for name, text in texts:
            redactor.text(name)
            redactor.text(text)
        rename = redactor.text
    return verdict.cause, sorted((str(each.rank), rename(each.host), rename(each.name)) for each in verdict.culprits)


@pytest.mark.parametrize("job", JOBS)
def test_a_bundle_gets_the_verdict_of_the_job(job: str, tmp_path: Path) -> None:
    answer = answer_of(tmp_path / "job", job)
    written = write_bundle(answer, tmp_path / "bundle.zip")
    assert written.same and named(answer_job([str(tmp_path / "bundle.zip")]).verdict) == named(answer.verdict, answer)
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        content = "\n".join([*archive.namelist(), *(archive.read(each).decode() for each in archive.namelist())])
    for name in ("dgx-a1", "anna", "schmidt", "trainer-b09", "10.77.3", "gpu-c31", TOKEN):
        assert name not in content, name


@pytest.mark.parametrize("case", read_corpus(OWN_CASES / "development"), ids=lambda case: case.name)
def test_the_cases_keep_class_and_culprits(case: KnownCase, tmp_path: Path) -> None:
    answer = answer_job([str(case.folder)])
    written = write_bundle(answer, tmp_path / "bundle")
    assert named(written.verdict) == named(answer.verdict, answer)


def test_nothing_is_overwritten_and_force_replaces_only_a_bundle(tmp_path: Path) -> None:
    answer = answer_of(tmp_path / "job", "healthy")
    target = tmp_path / "bundle"
    write_bundle(answer, target)
    with pytest.raises(BundleRefused, match="exists"):
        write_bundle(answer, target)
    write_bundle(answer, target, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "mine.zip").write_text("x")
    for other in ("mine", "mine.zip", "job"):
        with pytest.raises(BundleRefused, match="is not a bundle"):
            write_bundle(answer, tmp_path / other, force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x" and (tmp_path / "mine.zip").read_text() == "x"


def test_what_is_no_text_is_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write(folder, **JOBS["healthy"])
    (folder / "blob").write_bytes(b"\x7fELF\0\0secret")
    written = write_bundle(answer_job([str(folder)]), tmp_path / "bundle")
    assert written.left_out == ("blob: not a text",) and not (tmp_path / "bundle" / "blob").exists()
    assert json.loads((tmp_path / "bundle" / MANIFEST).read_text())["left_out"] == ["blob: not a text"]


def test_the_bundle_of_a_run_of_ours_has_its_record_and_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "my-secret-run"
    with Ledger.create(folder, {"recipe": "grpo", "name": "my-secret-run", "steps": 8}) as ledger:
        ledger.record_event("start", rows=20, run_folder=str(folder))
        ledger.commit(0, {})
        ledger.record_event("end", reason="finished", steps=1)
    (folder / "logs" / "controller.log").write_text("2026-11-21 14:10:00,000 controller I x: started\n")
    (folder / "data.jsonl").write_text("private\n")
    answer = answer_job([str(folder)])
    write_bundle(answer, tmp_path / "bundle")
    again = answer_job([str(tmp_path / "bundle")])
    assert again.title == answer.title == "The run finished: 1 of 8 steps"
    files = [each for each in (tmp_path / "bundle").rglob("*") if each.is_file()]
    assert not any("my-secret-run" in each.read_text() for each in files)
    assert {each.name for each in files} == {"config.yaml", "controller.log", "run-record.json", MANIFEST}


def test_a_case_is_added_to_a_corpus_that_the_benchmark_reads(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    first, _ = share_case(answer_of(tmp_path / "a", "exception of a rank"), corpus)
    second, _ = share_case(
        answer_of(tmp_path / "b", "refused address"), corpus, cause="network_blocked", culprits=["trainer-b09"]
    )
    truth = json.loads((corpus / "truth.json").read_text())
    assert truth[first]["class"] == "rank_exception_masked" and truth[first]["culprit"] == [1]
    assert not truth[first]["confirmed"] and truth[second]["confirmed"]
    assert truth[second]["class"] == "network_blocked" and truth[second]["culprit"] == ["machine-1"]
    cases = {each.name: each for each in read_corpus(corpus)}
    verdict = answer_job([str(cases[first].folder)]).verdict
    assert cases[first].class_right(verdict) and cases[first].culprits_right(verdict)
    with pytest.raises(BundleRefused, match="already"):
        share_case(answer_of(tmp_path / "a", "exception of a rank"), corpus)


def test_bad_values_are_refused_with_the_remedy(tmp_path: Path) -> None:
    answer = answer_of(tmp_path / "job", "healthy")
    with pytest.raises(BundleRefused, match=r"no such class\. One of: rendezvous_incomplete"):
        share_case(answer, tmp_path / "corpus", cause="hang")
    with pytest.raises(BundleRefused, match=r"no truth\.json"):
        share_case(answer, tmp_path / "job")
    assert not (tmp_path / "corpus").exists()


def test_what_only_a_link_leads_to_is_not_shared(tmp_path: Path) -> None:
    logs, private = tmp_path / "logs", tmp_path / "private"
    write(logs, **JOBS["mismatch"])
    private.mkdir()
    (private / "notes.log").write_text("what nobody shares\n")
    (logs / "link.log").symlink_to(private / "notes.log")
    (logs / "folder").symlink_to(private)
    (logs / "same.log").symlink_to(next(logs.glob("rank_0*")).name)
    for number, paths in enumerate(([str(logs)], [f"{logs}/*.log"])):
        written = write_bundle(answer_job(paths), tmp_path / f"bundle{number}")
        texts = [each.read_text() for each in written.path.rglob("*") if each.is_file()]
        assert not any("nobody shares" in text for text in texts)
        assert any(each.startswith("link.log") or "/link.log" in each for each in written.left_out)
        assert list(written.path.rglob("same.log"))
    named = write_bundle(answer_job([str(logs / "link.log"), str(logs / "same.log")]), tmp_path / "named")
    assert named.files == 2, "a file that is given by its name is meant"
