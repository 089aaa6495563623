"""`lockstep explain` of dumps with known faults, of incidents, and of folders without dumps."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.dump_cases import CASES, Case, job
from benchmarks.dump_files import dump, write
from lockstep.cli import app
from lockstep.watch.diagnosis.verdict import (
    Alternative,
    Culprit,
    Fact,
    StalledCollective,
    Verdict,
    VerdictKind,
    VerdictLevel,
    WaitLink,
    parse_verdict,
)
from lockstep.watch.dumps.explain_dumps import explain_dumps, read_dumps
from lockstep.watch.supervisor.incident import IncidentContents
from lockstep.watch.supervisor.incident import write_incident as write_incident

FILES = Path(__file__).parent / "files"
VERDICT = Verdict(
    VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy", "b", 77, "score() at reward.py:31"),), "unknown",
    StalledCollective("fsdp", 412, "all_reduce", "fsdp.py:9 in step"),
    (WaitLink("rank 0", "rank 1", "all_reduce #412", 41.0),),
    0.9, (Alternative("slow_rank_preprocess", 0.3),), (Fact("it sleeps", "stack"), Fact("x", file="a.log", line=3)),
    "rank 1 has not come.", "Wake it.", ("its stack",),
)  # fmt: skip


def explain(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_the_culprits_are_named(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)
    verdict, *_ = explain_dumps(tmp_path)
    assert {culprit.rank for culprit in verdict.culprits} == case.culprits
    assert not case.kinds or verdict.kind in case.kinds
    assert verdict.level is (
        VerdictLevel.CONFIRMED if case.culprits or "in_flight" in case.kinds else VerdictLevel.NOTICE
    )
    assert verdict.explanation


@pytest.mark.parametrize(
    ("case", "kind", "culprits", "said"),
    [
        ("absent", "absent", [2], "rank 2 has not entered all_reduce #7 on 'default_pg'"),
        ("absent_json", "absent", [2], "rank 2 has not entered all_reduce #7 on 'default_pg'"),
        ("timed_out", "absent", [2], "rank 2 has not entered all_reduce #7 on 'default_pg'"),
        (
            "mismatch",
            "mismatch",
            [2],
            "rank 2 called all_gather([[4, 2]] -> [[3, 4, 2]], Float) where the others called",
        ),
        ("recv", "unknown", [], "Cannot tell which rank is late for all_reduce #8"),
        ("healthy", "unknown", [], "Every collective that was entered was completed"),
    ],
)
def test_real_gloo_dumps(case: str, kind: str, culprits: list[int], said: str) -> None:
    folder = FILES / f"gloo_{case}"
    text = explain(folder)
    assert said in " ".join(text.split())
    verdict = json.loads(explain(folder, "--json"))
    assert (verdict["kind"], [each["rank"] for each in verdict["culprits"]]) == (kind, culprits)
    assert verdict["class"] == {"mismatch": "rank_divergent_branch", "healthy": "benign"}.get(case, "unknown")
    if case == "absent":
        site = verdict["collective"]["call_site"]
        assert verdict["collective"] == {"communicator": "default_pg", "seq": 7, "operation": "all_reduce",
                                         "op": "all_reduce", "call_site": site}  # fmt: skip
        assert verdict["collective"]["call_site"].endswith(" in last_step")
        (fact,) = (each for each in verdict["evidence"] if "file" in each)
        assert (
            fact["file"] == str(folder / "nccl_trace_rank_2")
            and "newest entry on 'default_pg' is barrier #6" in fact["text"]
        )


def test_json_is_the_only_output() -> None:
    said = json.loads(explain(FILES / "gloo_absent", "--json"))
    assert list(said) == [*VERDICT.json(), "distinguish"]
    assert parse_verdict(said).json() | {"distinguish": said["distinguish"]} == said


def test_missing_dumps_become_evidence_and_next_steps(tmp_path: Path) -> None:
    made = job()
    made.programs[5] = made.programs[5][:9]
    write(made.play(), tmp_path, ranks=[0, 1, 2, 3, 4, 6, 7])
    said = json.loads(explain(tmp_path, "--json"))
    assert said["kind"] == "unknown" and said["culprits"] == []
    assert {"source": "dumps", "text": "no dump of rank 5"} in said["evidence"]
    assert said["collect"][0] == "the flight-recorder dump of rank 5"


def test_a_missing_dump_is_not_excluded_if_another_one_is_missing_too(tmp_path: Path) -> None:
    made = job()
    made.programs[5] = made.programs[5][:9]
    write(made.play(), tmp_path, ranks=[0, 1, 2, 3, 4, 6])
    said = json.loads(explain(tmp_path, "--json"))
    assert said["kind"] == "unknown" and said["culprits"] == []
    assert "Nothing is known of rank 5, rank 7" in said["explanation"]
    assert said["collect"][0] == "the flight-recorder dump of ranks 5, 7"


def test_an_unanswered_receive_leads_to_the_sender(tmp_path: Path) -> None:
    """Pipeline parallel: rank 0 does not send, rank 1 receives from it, and all others wait for both in the world."""
    made = job(4)
    for rank in (0, 1):
        made.programs[rank] = made.programs[rank][:30]
    made.play()
    contents = [dump(made, rank) for rank in range(4)]
    recv = contents[1]["entries"][-1] | {
        "record_id": 30, "process_group": ("7", "pp"), "pg_id": 7, "profiling_name": "nccl:recv 1<-0", "is_p2p": True,
        "collective_seq_id": 0, "p2p_seq_id": 5, "state": "started", "retired": False,
    }  # fmt: skip
    contents[1]["entries"].append(recv | {"time_created_ns": recv["time_created_ns"] + 10**9})
    for rank in (0, 1):
        contents[rank]["pg_config"]["7"] = {"name": "7", "desc": "pp", "ranks": "[0, 1]"}
    for rank, content in enumerate(contents):
        (tmp_path / f"rank{rank}.pickle").write_bytes(pickle.dumps(content, 2))
    verdict, *_ = explain_dumps(tmp_path)
    assert (verdict.kind, [each.rank for each in verdict.culprits]) == (VerdictKind.ABSENT, [0])
    assert "send/recv" in read_dumps(tmp_path).calls.by_signature[1].operation
    assert "pp, rank 0 to 1" in [each.name for each in read_dumps(tmp_path).communicators.info]


def test_options_give_the_pattern_of_ranks_and_their_number(tmp_path: Path) -> None:
    made = job()
    made.backend = "gloo"
    made.programs[5] = made.programs[5][:9]
    write(made.play(), tmp_path, ranks=range(6), name="node/x{rank}y.fr")
    text = explain(tmp_path, "--ranks", "node/x{rank}y.fr", "--world-size", "8")
    assert "rank 5 has not entered" in text and "no dump of ranks 6, 7" in text
    for option in ("nothing", "x{rank}"):
        result = CliRunner().invoke(app, ["explain", str(tmp_path), "--ranks", option])
        assert result.exit_code == 2 and "refused" in result.stderr


def test_an_incident_prints_its_verdict(tmp_path: Path) -> None:
    made = write_incident(
        tmp_path / "incidents", IncidentContents(VERDICT, wall=1_790_000_000.0, at_ns=0, gaps=["host c"])
    )
    assert made is not None
    for path in (made, made / "verdict.json", made.parent):
        said = json.loads(explain(path, "--json"))
        assert [each["class"] for each in said.pop("distinguish")] == ["slow_rank_preprocess"]
        assert said == VERDICT.json()
    text = explain(made)
    for part in ("rank 1 has not come.", "rank 1 (policy, host b, pid 77) in score() at reward.py:31", "0.90",
                 "all_reduce #412 on fsdp, called at fsdp.py:9 in step", "rank 0 has waited for rank 1 for 41s",
                 "it sleeps  [stack]", "x  [a.log:3]", "slow_rank_preprocess (0.30)", "Wake it."):  # fmt: skip
        assert part in text, text
    second = write_incident(made.parent, IncidentContents(VERDICT, wall=1_790_000_100.0, at_ns=0))
    assert second is not None and "also: absent: rank 1 has not come." in explain(made.parent)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kind": "odd", "level": "notice"}', '{"kind": "dead", "level": 3}']
)
def test_a_damaged_incident_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text(content)
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 2 and "refused" in result.stderr and "Traceback" not in result.output


def test_the_message_names_what_was_searched_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    for part in ("no flight-recorder dump", "nccl_trace_rank_0", "verdict.json"):
        assert part in result.stderr


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from lockstep.cli import app\n"
        f"try: app(['explain', {str(FILES / 'gloo_absent')!r}])\n"
        "except SystemExit as end: print(end.code, [n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().splitlines()[-1] == "0 []", done.stdout
