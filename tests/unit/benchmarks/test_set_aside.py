"""The set-aside corpus is complete, neutral and scored only when it is named. Nothing here judges its jobs."""

import json
from importlib.resources import files

from benchmarks.case_corpus import OWN_CASES, own_corpora, read_corpus
from benchmarks.set_aside_jobs.__main__ import CORPUS, ENTRIES, MOST_BYTES

PRIVATE = ("/tmp/trees", "/tmp/aside", "/work/main", "/root", "192.0.2.")
"""What no stored log may contain: places of the machine that the jobs ran on."""


def test_the_corpus_is_scored_only_when_it_is_named() -> None:
    assert OWN_CASES / "set_aside" not in own_corpora()
    assert len(read_corpus(OWN_CASES / "set_aside")) >= 60


def test_the_truth_is_what_the_entries_say_about_the_jobs_that_are_there() -> None:
    truth = json.loads((CORPUS / "truth.json").read_text())
    assert truth == {name: ENTRIES[name].truth() for name in truth}
    assert set(truth) == {each.name for each in (CORPUS / "jobs").iterdir()}
    known = {each.name.removesuffix(".yaml") for each in files("lockstep.doctor.knowledge.data").iterdir()}
    assert {name for each in truth.values() for name in (each["class"], *each["also_ok"])} <= known


def test_logs_are_small_and_show_no_place_of_this_machine() -> None:
    for path in (CORPUS / "jobs").rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert len(text.encode()) <= MOST_BYTES, path
            assert [each for each in PRIVATE if each in text] == [], path
