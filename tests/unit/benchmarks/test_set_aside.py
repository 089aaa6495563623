"""The corpora set aside are complete, neutral and scored only when they are named. Nothing here judges their jobs."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.case_corpus import own_corpora, read_corpus
from benchmarks.set_aside_jobs.__main__ import CORPORA, ENTRIES, MOST_BYTES, folder_of, truth

PRIVATE = ("/tmp/trees", "/tmp/aside", "/tmp/fresh", "/work/main", "/root", "192.0.2.")
"""What no stored log may contain: places of the machine that the jobs ran on."""


def test_the_corpora_are_scored_only_when_they_are_named() -> None:
    assert not set(CORPORA) & set(own_corpora())
    assert [len(read_corpus(each)) for each in CORPORA] == [63, 53, 76, 45, 94, 109, 145, 129, 100, 109]


@pytest.mark.parametrize("corpus", CORPORA, ids=lambda each: each.name)
def test_the_truth_is_what_the_entries_say_about_the_jobs_that_are_there(corpus: Path) -> None:
    said = json.loads((corpus / "truth.json").read_text())
    assert said == truth(corpus)
    assert set(said) == {each.name for each in (corpus / "jobs").iterdir()}
    known = {each.name.removesuffix(".yaml") for each in files("lockstep.doctor.knowledge.data").iterdir()}
    assert {name for each in said.values() for name in (each["class"], *each["also_ok"])} <= known


def test_a_job_is_stored_in_the_corpus_that_has_it() -> None:
    places = {name: [each for each in CORPORA if (each / "jobs" / name).is_dir()] for name in ENTRIES}
    assert [name for name, those in places.items() if len(those) > 1] == []
    assert all(folder_of(name) == those[0] / "jobs" / name for name, those in places.items() if those)
    assert folder_of("one-that-nobody-ran") == CORPORA[-1] / "jobs" / "one-that-nobody-ran"


def test_logs_are_small_and_show_no_place_of_this_machine() -> None:
    for path in (path for corpus in CORPORA for path in (corpus / "jobs").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert len(text.encode()) <= MOST_BYTES, path
            assert [each for each in PRIVATE if each in text] == [], path
