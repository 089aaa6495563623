"""Findings as a report, as JSON and on the terminal."""

import json
from io import StringIO

from lockstep.doctor.output.findings import CheckReport, Finding, guarded_findings
from lockstep.doctor.output.findings_table import render_report
from lockstep.report.safe_console import SafeConsole


def _shown(report: CheckReport, width: int = 100) -> str:
    console = SafeConsole(StringIO(), force_terminal=False)
    console.width = width
    console.print(render_report(report))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_report_passes_unless_there_is_an_error() -> None:
    report = CheckReport()
    assert report.passed
    report.add("limits", "Limits", [Finding("nofile", "warning", "a", "1024 open files")])
    assert report.passed
    report.add("gpus", "GPUs", [Finding("xid", "error", "a", "Xid 79", "it fell off", "reset it", "https://x")], 0.2)
    assert not report.passed
    assert report.counts() == {"error": 1, "warning": 1, "note": 0, "ok": 0, "unchecked": 0}


def test_the_json_form() -> None:
    report = CheckReport()
    report.add("gpus", "GPUs", [Finding("xid", "error", "a", "Xid 79", "it fell off", "reset it", "https://x")], 0.25)
    form = json.loads(json.dumps(report.json()))
    assert form["passed"] is False
    assert form["rungs"] == [{"name": "gpus", "title": "GPUs", "seconds": 0.25}]
    assert form["findings"] == [
        {
            "rung": "gpus", "id": "xid", "severity": "error", "host": "a", "seen": "Xid 79", "why": "it fell off",
            "fix": "reset it", "source": "https://x",
        }
    ]  # fmt: skip


def test_worst_first_with_the_fix_and_hosts_only_where_there_are_several() -> None:
    report = CheckReport()
    fine = Finding("shm", "ok", "a", "24 GiB of /dev/shm", "would be said if it were wrong")
    bad = Finding("memlock", "error", "a", "64 KiB may be locked", "InfiniBand pins memory", "ulimit -l unlimited")
    report.add("limits", "Limits", [fine, bad])
    shown = _shown(report)
    assert shown.index("64 KiB") < shown.index("24 GiB")
    assert "fix: ulimit -l unlimited" in shown and "would be said" not in shown
    assert "a: " not in shown and "1 error  (1 ok)" in shown
    report.add("limits", "Limits", [Finding("shm", "ok", "b", "24 GiB")])
    assert "a: 64 KiB" in _shown(report)


def test_no_problems_names_unchecked_items() -> None:
    report = CheckReport()
    report.add("gpus", "GPUs", [Finding("gpus", "unchecked", "a", "no nvidia-smi")])
    assert "no problems found  (1 could not be checked here)" in _shown(report)


def test_warnings_are_counted_in_the_summary() -> None:
    report = CheckReport()
    report.add("environment", "Environment", [Finding("env-unread", "warning", "", "NCCL_TIMEOUT is read by nobody")])
    assert _shown(report).strip().endswith("no errors, 1 warning")
    report.add("limits", "Limits", [Finding("shm", "ok", "a", "24 GiB"), Finding("x", "error", "a", "y")])
    assert "1 error  (1 warning, 1 ok)" in _shown(report)


def test_terminal_escapes_are_not_obeyed() -> None:
    report = CheckReport()
    report.add("x", "X", [Finding("x", "error", "a", "\x1b]0;title\x07seen [bold]here[/]", fix="\x1b[2Jclear")])
    shown = _shown(report)
    assert "\x1b" not in shown and "\x07" not in shown and "[bold]here[/]" in shown


def test_a_refused_check_is_unchecked() -> None:
    def refuse() -> list[Finding]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    (found,) = guarded_findings("kernel-log", "a", "the kernel's log", refuse)
    assert found.severity == "unchecked"
    assert "kernel's log could not be checked" in found.seen and "/dev/kmsg" in found.seen
