"""Pages that Lockstep writes show hostile text, load nothing and run nothing; also in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.base.secure_html import with_strict_policy
from lockstep.doctor.output.answer_page import answer_page
from lockstep.doctor.output.job_answer import answer_job
from lockstep.ledger import CompletionSample, Ledger
from lockstep.report.html_report import render_html

EVIL = (
    "</pre></style></title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    '<style>body{display:none}</style><p style="color:red">\'"&#34; javascript:alert(1) {{ 7*7 }}'
)
INJECTED = (
    "<script>document.title='owned'</script><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw=' "
    "onload=\"document.title='owned'\" onerror=\"document.title='owned'\"><style>h1{display:none}</style>"
    "<p style='color: red'>x</p>"
)
"""What an error in the escaping of a page would let through."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def hostile_run(folder: Path) -> str:
    config = {"recipe": "grpo", "name": EVIL, "steps": 3, "model": {"path": EVIL}, "trainer": {"ranks": 1}}
    with Ledger.create(folder, config) as ledger:
        sample = CompletionSample(EVIL, EVIL, EVIL, 1.0, {EVIL: 1.0}, EVIL, EVIL)
        ledger.record_evaluation(-1, {"eval/exact_match": 1.0, f"eval/{EVIL}": 1.0}, [sample])
        for step in range(3):
            ledger.record_metrics(step, {f"reward/{EVIL}": 1.0, EVIL: 2.0, "reward/mean": 0.1 * step, "time/a_s": 1.0})
            ledger.commit(step, {})
        ledger.record_event(EVIL, why=EVIL)
        stall = {
            "number": 1, "change": "told", "level": "confirmed", "verdict": "absent", "cause": EVIL, "who": [EVIL],
            "text": EVIL, "since_s": 0.0, "said_at": ledger.commits()[1].at, "incident": f"javascript:alert(1)//{EVIL}",
        }  # fmt: skip
        ledger.record_event("stall", **stall)
        return render_html(ledger, EVIL)


def hostile_explanation(folder: Path) -> str:
    folder.mkdir()
    log = folder / "<script>alert(1)<"
    steps = "".join(f"step {at} loss 1.0\n" for at in range(20))
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x\nKeyError: '
    log.write_text(f"{steps}{traceback}{EVIL!r}\n")
    return answer_page(answer_job([str(log)]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    return {"report": hostile_run(folder / "run"), "explanation": hostile_explanation(folder / "logs")}


@pytest.mark.parametrize("name", ["report", "explanation"])
def test_hostile_text_is_escaped_and_the_policy_is_strict(name: str, pages: dict[str, str]) -> None:
    page = pages[name]
    assert "onerror" in page and not re.search(r"<(?:script|img|p style)", page)
    assert re.search(r"default-src 'none'; style-src 'sha256-[\w+/=]+'; base-uri 'none'; form-action 'none'", page)
    assert page.index("Content-Security-Policy") < page.index("<title>"), "it must hold before anything of others"
    assert page.count("<style") == 1 and not re.search(r'<[^>"]* style="', page)
    assert "unsafe" not in page.partition("<body>")[0].partition("content=")[2].partition(">")[0]
    assert all(link.startswith(("./", "#")) for link in re.findall(r'(?:xlink:)?href="([^"]*)"', page))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
@pytest.mark.parametrize("name", ["report", "explanation"])
def test_a_browser_runs_nothing_that_slips_through(name: str, pages: dict[str, str], tmp_path: Path) -> None:
    whole = pages[name]
    assert "Content Security Policy" not in visit(whole, tmp_path / "clean")[1], "the page keeps its own policy"
    injected, logged = visit(whole.replace("<body>", f"<body>{INJECTED}"), tmp_path / "injected")
    assert "<title>owned</title>" not in injected
    for refused in ("script-src", "style-src"):
        assert refused in logged, logged
    without = re.sub(r"<meta http-equiv[^>]*>", "", whole).replace("<body>", f"<body>{INJECTED}")
    assert "<title>owned</title>" in visit(without, tmp_path / "without")[0], "the attack works without the policy"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_browser_shows_the_report_as_without_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_policy = hostile_run(tmp_path / "run")
    monkeypatch.setattr("lockstep.report.html_report.with_strict_policy", lambda page, pictures=False: page)
    shutil.rmtree(tmp_path / "run")
    without = hostile_run(tmp_path / "run")
    footer = re.compile(r"<footer>.*?</footer>|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\+\d+\.\d s", re.DOTALL)
    first = picture(with_strict_policy(footer.sub("", without)), tmp_path / "with")
    second = picture(footer.sub("", without), tmp_path / "without")
    assert "Content-Security-Policy" in with_policy and len(first) > 20_000
    assert first == second


def browser(page: str, folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    folder.mkdir()
    (folder / "page.html").write_text(page, errors="replace")
    assert CHROMIUM is not None
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1200,6000", "--virtual-time-budget=2000",
         "--enable-logging=stderr", *options, f"file://{folder / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def visit(page: str, folder: Path) -> tuple[str, str]:
    """The document after its scripts ran, and what the browser logged."""
    done = browser(page, folder, "--dump-dom")
    return done.stdout, done.stderr


def picture(page: str, folder: Path) -> bytes:
    browser(page, folder, f"--screenshot={folder / 'page.png'}")
    return (folder / "page.png").read_bytes()
