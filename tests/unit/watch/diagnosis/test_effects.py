"""The inference about live evidence: its table of effects, its confidence, mutual causes and crowds of deaths."""

import itertools
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_diagnose import AT, Group, One, check, diagnose, fsdp, only, policy, snapshot

from lockstep.watch.diagnosis import effects, live_weights
from lockstep.watch.diagnosis.evidence_types import Liveness, ProcessNote
from lockstep.watch.diagnosis.verdict import VerdictKind, VerdictLevel

WEIGHTS = live_weights.live_weights()
KINDS = {"crash", "kill", "death", "echo", "exit", "stopped", "absent", "late", "doubted_device"}


def test_the_table_names_known_kinds_and_conditions() -> None:
    kinds = KINDS | {str(each) for each in VerdictKind} - {"dead"}
    assert {kind for pair in WEIGHTS.effects for kind in pair} <= kinds
    used = {name for rules in WEIGHTS.effects.values() for rule in rules for name in rule}
    assert used == set(effects.CONDITIONS)


def test_every_factor_is_answered_somewhere_and_no_other() -> None:
    folder = Path(effects.__file__).parent
    code = "".join(each.read_text("utf-8") for each in folder.glob("*.py") if each.stem != "live_weights")
    assert {name for name in WEIGHTS.factors if f'"{name}"' in code} == set(WEIGHTS.factors)
    answered = set(re.findall(r'\{"(\w+)": (?:True|False|proven|others_run)', code)) | set(
        re.findall(r'end="(\w+)"', code)
    )
    assert answered <= set(WEIGHTS.factors)


def test_no_more_than_thirty_numbers() -> None:
    """So few that cases that nobody had looked at are judged as well as those that the numbers were chosen by."""
    text = Path(live_weights.__file__).with_suffix(".yaml").read_text("utf-8").split("\neffects:")[0]
    assert len(re.findall(r": -?\d+\.\d+", text)) <= 30


@pytest.mark.parametrize(
    ("proof", "source", "most"),
    [
        ("structure", "beacons", 0.95),
        ("inactivity", "incident", 0.78),
        ("inactivity", "dumps", 0.7),
        ("notice", "dumps", 0.6),
    ],
)
def test_no_answers_exceed_the_ceiling_of_their_proof(proof: str, source: str, most: float) -> None:
    rng, found = random.Random(1), []
    for _ in range(500):
        answers = {name: rng.choice([True, True, False, None]) for name in WEIGHTS.factors}
        found.append(WEIGHTS.confidence(answers, source, proof))
        assert found[-1] <= min(most, 0.6 if answers["by_elimination"] else 1.0)
    assert WEIGHTS.confidence({"named_failure": True}, source, proof) == most


def test_what_is_not_observed_adds_nothing() -> None:
    assert WEIGHTS.log_odds({"past_limit": None, "at_rest": None}) == WEIGHTS.log_odds({}) == 0.0


def test_of_two_causes_that_may_each_explain_the_other_the_likelier_remains() -> None:
    """An abort may follow from the deadlock, and the deadlock from the abort: they are seen at the same time."""
    a, b = Group("a", [0, 1], [6, 5], [5] * 2), Group("b", [0, 1, 2], [3, 4, 4], [3] * 3)
    aborted = One("policy-2", Liveness.DEAD, -6, ended=AT - 60.5)
    assert diagnose(snapshot([*policy(2), aborted], [a, b])), "one of them is the cause"


def test_the_answers_are_part_of_the_evidence() -> None:
    verdict = only(diagnose(snapshot(policy(4), [fsdp()])))
    told = [each.text for each in verdict.evidence if each.source == "diagnosis"]
    assert "nothing has moved for longer than its limit" in told


def test_a_crowd_of_deaths_is_judged_in_seconds() -> None:
    """One rank is killed, and the connections of all others break; or all raise the same exception."""
    count, reset = 3000, "RuntimeError: Connection reset by peer"
    job = snapshot(
        [
            One(f"policy-{i}", Liveness.DEAD, 1, ended=AT - 30 + i * 1e-4, note=ProcessNote(error=f"{reset} [{i}]"))
            for i in range(count)
        ],
        [fsdp(late=None, count=count)],
    )
    started = time.monotonic()
    codes = job.processes.exit_code.copy()
    codes[7] = -9
    notes = {i: note for i, note in job.processes.notes.items() if i != 7}
    verdict = check(
        diagnose(replace(job, processes=replace(job.processes, exit_code=codes, notes=notes))),
        VerdictKind.DEAD,
        ["policy-7"],
    )
    assert any(each.text.endswith("later or as an effect") for each in verdict.evidence)
    same = dict.fromkeys(range(count), ProcessNote(error="ValueError: x"))
    everybody = only(diagnose(replace(job, processes=replace(job.processes, notes=same))))
    assert len(everybody.culprits) == count and everybody.level is VerdictLevel.CONFIRMED
    assert time.monotonic() - started < 20.0


def test_deaths_whose_order_forms_a_circle_leave_one_cause() -> None:
    """Deaths 0.08 s apart have no order, and those 0.15 s apart have one: the likeliest remains."""
    for codes in itertools.permutations((-6, -15, 1)):
        dead = [One(f"policy-{i}", Liveness.DEAD, code, ended=AT - 30 + 0.08 * i) for i, code in enumerate(codes)]
        assert only(diagnose(snapshot(dead, [fsdp(late=None, count=3)]))).kind is VerdictKind.DEAD
