"""Incident folders are written completely or not at all, are bounded, and contain no secrets."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.watch.diagnosis.verdict import Culprit, StalledCollective, Verdict, VerdictKind, VerdictLevel, WaitLink
from lockstep.watch.supervisor import incident
from lockstep.watch.supervisor.incident import IncidentContents

TOKEN = "the-run's-token"
VERDICT = Verdict(
    VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy", "b", 77, "score() at reward.py:31", "policy-1"),),
    "rank_divergent_branch", StalledCollective("fsdp", 412, "all_reduce", "train.py:9"),
    (WaitLink("policy-0", "policy-1", "all_reduce #412", 41.0),), 0.97, explanation="policy-1 has not entered.",
)  # fmt: skip


def bundle(**more: Any) -> dict[str, Any]:
    events = [{"number": 1, "at_ns": 4_000_000_000, "kind": "collective", "text": "all_reduce"}]
    return {
        "beacons": {"policy-1": {"name": "policy-1", "events": events}},
        "logs": {"policy-1": f"token {TOKEN}\nkey hf_abcdefghijklmnopqrstuvwxyz0123"},
        "environment": {"WANDB_API_KEY": "0123456789abcdef0123", "PATH": "/bin"}, "processes": [], "machine": {},
    } | more  # fmt: skip


def contents(**more: Any) -> IncidentContents:
    fields: dict[str, Any] = {
        "bundles": {"b": bundle()}, "offsets": {"b": 1_000_000_000}, "facts": {"config": {"name": "x"}},
        "stacks": {"policy-1": [{"thread": 77, "name": "", "frames": [["score", "reward.py", 31]]}]},
        "gaps": ["host c did not answer"],
    }  # fmt: skip
    return IncidentContents(VERDICT, 1_700_000_000.0, 5_000_000_000, **(fields | more))


def test_the_folder_has_all_files(tmp_path: Path) -> None:
    folder = incident.write_incident(tmp_path / "incidents", contents())
    assert folder is not None and folder.name.endswith("-absent-policy-1")
    assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()) == [
        "beacons.json", "capture.jsonl", "environment.json", "logs/policy-1.log", "machine.json", "processes.json",
        "run.json", "stacks/policy-1.txt", "story.txt", "timeline.json", "told.json", "verdict.json",
    ]  # fmt: skip
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["collective"]["seq"], verdict["wall"]) == (412, 1_700_000_000.0)
    assert [next(iter(json.loads(line))) for line in (folder / "capture.jsonl").read_text().splitlines()] == [
        "lockstep_timeline", "verdict", "end",
    ]  # fmt: skip
    assert "score (reward.py:31)" in (folder / "stacks" / "policy-1.txt").read_text()
    story = (folder / "story.txt").read_text()
    for words in ("policy-1 has not entered", "all_reduce #412 on 'fsdp'", "for 41 s", "host c did not answer"):
        assert words in story
    assert incident.list_incidents(tmp_path / "incidents") == [folder]


def test_the_timeline_is_on_one_clock() -> None:
    """The host's clock is one second ahead: its time 4 s is two seconds before the verdict at 5 s."""
    assert incident.incident_timeline(contents()) == [
        {"at_s": -2.0, "who": "policy-1", "host": "b", "kind": "collective", "text": "all_reduce"}
    ]


def test_no_secret_is_written(tmp_path: Path) -> None:
    told = [{"wall": 0.0, "change": "told", "headline": f"it says {TOKEN}"}]
    facts = {"config": {"api_key": "abc", "note": "https://u:geheim@host/"}}
    folder = incident.write_incident(tmp_path, contents(told=told, facts=facts), (TOKEN,))
    assert folder is not None
    text = "".join(each.read_text() for each in folder.rglob("*") if each.is_file())
    for secret in (TOKEN, "hf_abcdefghijklmnopqrstuvwxyz0123", "0123456789abcdef0123", "geheim", '"abc"'):
        assert secret not in text
    assert "/bin" in text


def test_a_secret_of_the_environment_is_redacted_in_all_files(tmp_path: Path) -> None:
    logs = {"policy-1": "logged in with 0123456789abcdef0123"}
    folder = incident.write_incident(tmp_path, contents(bundles={"b": bundle(logs=logs)}))
    assert folder is not None and "0123456789abcdef0123" not in (folder / "logs" / "policy-1.log").read_text()


def test_only_this_user_can_read_an_incident(tmp_path: Path) -> None:
    folder = incident.write_incident(tmp_path, contents())
    assert folder is not None
    for each in (folder, *folder.rglob("*")):
        assert each.stat().st_mode & 0o077 == 0, each


def test_an_incident_that_cannot_be_written_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    assert incident.write_incident(tmp_path, contents()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_created_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert incident.write_incident(tmp_path / "file" / "incidents", contents()) is None


def test_file_sizes_and_the_number_of_incidents_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident, "FILE_BYTES", 1000)
    monkeypatch.setattr(incident, "MAX_INCIDENTS", 2)
    big = contents(bundles={"b": bundle(logs={"policy-1": "x" * 5000})})
    first, second = incident.write_incident(tmp_path, big), incident.write_incident(tmp_path, big)
    assert first is not None and second is not None and second.name == first.name + ".2"
    assert (first / "logs" / "policy-1.log").stat().st_size == 1000
    assert incident.write_incident(tmp_path, big) is None


def test_names_contain_only_safe_characters() -> None:
    odd = Verdict(VerdictKind.DEAD, VerdictLevel.CONFIRMED, tuple(Culprit(n, "pol/../icy") for n in range(5)))
    name = incident.incident_name(odd, 0.0)
    assert "/" not in name and name.endswith("+more")
    assert incident.incident_name(Verdict(VerdictKind.IN_FLIGHT, VerdictLevel.CONFIRMED), 0.0).endswith(
        "-in_flight-nobody"
    )
