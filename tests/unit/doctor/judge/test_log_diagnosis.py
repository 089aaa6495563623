"""Files are explained by one verdict."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor.judge.log_diagnosis import explain, fill_fields
from tests.unit.doctor.job_logs import raised, write

_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:31133."


def _add_traceback(rank: int, last: str, name: str = "train.py") -> str:
    lines = ["Traceback (most recent call last):", f'  File "/home/u/{name}", line 12, in step', "    x = f(y)", last]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def test_the_first_exception_is_distinguished_from_lost_peers(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {at} loss 1.0\n" for at in range(20)) + _add_traceback(0, _PEER)
                   + _add_traceback(2, "KeyError: 'labels'") + _add_traceback(1, _PEER))  # fmt: skip
    verdict = explain([str(log)]).verdict
    assert verdict.cause == "rank_exception_masked"
    assert [each.rank for each in verdict.culprits] == [2]
    assert verdict.evidence[0].text == "[rank2]: KeyError: 'labels'" or verdict.evidence[0].text == "KeyError: 'labels'"
    assert verdict.evidence[0].line == 28


def test_a_healthy_run_is_benign(tmp_path: Path) -> None:
    lines = [f"2026-11-21 14:{at:02d}:00 step {at} loss 0.5" for at in range(50)]
    lines[10] += "\nWARNING: connection reset by peer, will retry"
    (tmp_path / "a.log").write_text("\n".join([*lines, "Training completed"]))
    verdict = explain([str(tmp_path)]).verdict
    assert verdict.cause == "benign" and verdict.confidence >= 0.8


def test_nothing_known_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello\n")
    assert explain([str(tmp_path)]).verdict.cause == "unknown"


def test_user_rules_are_used(tmp_path: Path) -> None:
    rules, logs = tmp_path / "rules", tmp_path / "a.log"
    rules.mkdir()
    (rules / "own.yaml").write_text(
        "class: storage_fault\ntitle: t\nexplanation: Mount {mount} is gone. It was {other}.\nfix: remount {mount}\n"
        "signatures: [{id: own, pattern: 'quokkafs lost (?P<mount>\\S+)', strength: 0.9, culprit: none}]\n"
    )
    logs.write_text("step 1\nstep 2\nquokkafs lost /data\n")
    verdict = explain([str(logs)], [rules]).verdict
    assert (verdict.cause, verdict.explanation, verdict.fix) == (
        "storage_fault",
        "Mount /data is gone.",
        "remount /data",
    )


def test_fill_fields() -> None:
    assert fill_fields("A {x}. B {y}.", {"x": "1"}) == "A 1."


def test_the_command(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("OSError: [Errno 98] Address already in use \x1b]0;evil\x07\n")
    page = tmp_path / "a.html"
    done = CliRunner().invoke(app, ["explain", str(log), "--json", "--html", str(page)])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["class"] == "port_in_use"
    assert said["evidence"][0]["file"] == "a.log" and said["evidence"][0]["line"] == 1
    assert "Address already in use" in page.read_text()
    shown = CliRunner().invoke(app, ["explain", str(log)])
    assert shown.exit_code == 0 and "\x1b]0" not in shown.stdout and "port_in_use" in shown.stdout


@pytest.mark.parametrize("path", ["/nowhere/at/all"])
def test_a_missing_path_is_rejected(path: str) -> None:
    done = CliRunner().invoke(app, ["explain", path])
    assert done.exit_code == 2


def test_the_package_knows_no_example_job() -> None:
    """Rules match the output of software, not the names of a particular job. Only `bundle` knows the format of a
    corpus, because it writes one."""
    home = Path(__file__).parents[4] / "src" / "lockstep" / "doctor"
    assert home.is_dir()
    for file in home.rglob("*"):
        if file.is_file() and file.suffix in (".py", ".yaml") and file.parent.name != "bundle":
            assert "cases/jobs" not in file.read_text() and "truth.json" not in file.read_text()


def test_lines_of_a_short_file_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(f"step {at} loss 0.5\n" for at in range(8)))
    found = explain([str(tmp_path)])
    assert [counter.step for counter in found.history.counters] == list(range(8))


def test_standard_input() -> None:
    done = CliRunner().invoke(app, ["explain", "-", "--json"], input="OSError: [Errno 98] Address already in use\n")
    said = json.loads(done.stdout)
    assert said["class"] == "port_in_use" and said["evidence"][0]["file"] == "stdin"


def test_log_text_is_not_markup(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("OSError: [Errno 98] Address already in use <script>alert(1)</script> [bold red]x[/]\n")
    page = tmp_path / "a.html"
    done = CliRunner().invoke(app, ["explain", str(log), "--html", str(page)])
    assert "<script>" not in page.read_text() and "&lt;script&gt;" in page.read_text()
    assert "[bold red]x[/]" in " ".join(done.stdout.split())


def test_an_archive_and_a_pattern(tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "rank1.log").write_text("".join(f"step {at}\n" for at in range(9)) + _add_traceback(1, "KeyError: 'x'"))
    with tarfile.open(tmp_path / "logs.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "rank1.log", "job/rank1.log")
    packed = explain([str(tmp_path / "logs.tar.gz")]).verdict
    plain = explain([str(tmp_path / "rank*.log")]).verdict
    assert packed.cause == plain.cause == "rank_exception_masked"
    assert packed.evidence[0].file == "logs.tar.gz/job/rank1.log"


def test_a_bad_rule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("class: nonsense\nsignatures: []\n")
    (tmp_path / "a.log").write_text("x\n")
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "a.log"), "--rules", str(tmp_path)])
    assert done.exit_code == 2 and "own.yaml" in done.stderr.replace("\n", "")


def test_an_exception_in_a_finaliser_is_harmless(tmp_path: Path) -> None:
    ignored = _add_traceback(0, "AttributeError: 'NoneType' object has no attribute 'close'").replace("[rank0]: ", "")
    steps = "".join(f"step {at} loss 0.5\n" for at in range(30))
    (tmp_path / "a.log").write_text(f"{steps}training finished\nException ignored in: <function E.__del__>\n{ignored}")
    assert explain([str(tmp_path)]).verdict.cause == "benign"


def test_a_restored_connection_does_not_end_a_healthy_run(tmp_path: Path) -> None:
    lines = [f" iteration {at:8d}/    5000 | lm loss: 1.5E+00" for at in range(60)]
    lines.insert(30, "reward client: [Errno 104] Connection reset by peer, once more")
    (tmp_path / "a.log").write_text("\n".join(lines))
    found = explain([str(tmp_path)])
    assert [counter.step for counter in found.history.counters] == list(range(60))
    assert found.verdict.cause == "benign"


def test_a_loss_that_ends_as_no_number_outweighs_a_report_of_completion(tmp_path: Path) -> None:
    rows = [f"step {at} loss 0.{90 - at}" for at in range(0, 20, 4)]
    for last, cause in (("step 20 loss inf", "nan_or_inf"), ("step 20 loss 0.5", "benign")):
        assert explain([write(tmp_path, job=[*rows, last, "saved to checkpoints"])]).verdict.cause == cause


def test_ranks_that_failed_on_another_host_explain_an_incomplete_rendezvous(tmp_path: Path) -> None:
    late = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 8/12 clients joined."
    error = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
    failed = [each.removeprefix("[rank0]: ") for each in raised(0, error)]
    verdict = explain([write(tmp_path, nd1=["nd1: starting", late], nd2=["nd2: starting", *failed])]).verdict
    assert verdict.cause == "version_mismatch" and [each.host for each in verdict.culprits] == ["nd2"]
