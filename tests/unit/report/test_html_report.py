import json
import math
import re
from html.parser import HTMLParser

import pytest
from report_helpers import CONFIG, make_run

from lockstep.ledger import CompletionSample, Ledger
from lockstep.report.charts import Chart, draw_chart, smoothed, thinned
from lockstep.report.html_report import metric_curves, render_html, write_report

VOID = {"meta", "link", "br", "img", "path", "use", "rect", "image"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page could load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_startendtag(self, tag, attributes):
        self.note(tag, attributes)

    def handle_starttag(self, tag, attributes):
        self.note(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def note(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
        assert not [name for name, _ in attributes if name.startswith("on")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    with make_run(tmp_path_factory.mktemp("runs") / "run", steps=60) as ledger:
        return write_report(ledger, "finished").read_text()


def test_the_page_is_self_contained(page):
    parsed = Page(page)
    assert parsed.open == []
    assert not {"script", "link", "img", "iframe", "image", "object"} & set(parsed.tags)
    assert all(reference.startswith("#") for reference in parsed.references)
    assert "@import" not in page and not re.findall(r"url\((?!#)", page)


def test_light_and_dark(page):
    assert "@media (prefers-color-scheme: dark)" in page
    drawn = "".join(drawings(page))
    assert drawn.count("var(--series-1)") >= 12 and "var(--muted)" in drawn
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", drawn)  # no colour that one of the two would hide


def test_every_stage_has_a_colour_of_its_own_in_light_and_dark(tmp_path):
    names = [
        "start",
        "rollout",
        "reward",
        "ledger",
        "pack",
        "logprobs",
        "train",
        "copy",
        "publish",
        "evaluate",
        "export",
    ]
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        ledger.commit(0, {})
        ledger.record_metrics(0, {f"time/{name}_s": 1.0 for name in names})
        text = write_report(ledger, "finished").read_text()
    rules = dict(re.findall(r'\[data-style="(\d+)"\] ?\{ ?background: var\((--series-\d+)\)', text))
    dots = re.findall(r'<span class="dot" data-style="(\d+)"></span>(\w+)</td>', text)
    drawn = [(rules[number], name) for number, name in dots]
    assert [name for _, name in drawn] == names
    for mode in (text.split("@media")[0], text.split("@media")[1]):
        values = dict(re.findall(r"(--series-\d+): (#[0-9a-f]{6})", mode))
        assert len({values[colour] for colour, _ in drawn}) == len(names)


def test_contents_of_the_page(page):
    text = " ".join(Page(page).text)
    for expected in (
        "grpo-sort", "finished", "Exact match on held-out prompts", "Reward by term", "KL to the reference", "Entropy",
        "Gradient norm", "Where the time went", "rollout", "checkpoint", "sort: 7 3 9 1 =", "1 3 7 9", "truncated",
        "prompts_per_step: 32", "started", "after 0 and after 60 steps",
    ):  # fmt: skip
        assert expected in text, expected


def test_drawings_do_not_share_ids(page):
    ids = re.findall(r' id="([^"]+)"', page)
    clips = [name for name in ids if re.fullmatch(r"p[0-9a-f]{10}", name)]
    assert len(clips) == len(set(clips)) > 10
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


EVIL = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&lt;{{ 7*7 }}\ud800"


def test_everything_is_escaped(tmp_path):
    config = {**CONFIG, "name": "run", "model": {"path": EVIL.replace("\ud800", "")}}
    with Ledger.create(tmp_path / "run", config) as ledger:
        sample = CompletionSample(EVIL, EVIL, EVIL, 1.0, {EVIL: 1.0}, EVIL, EVIL)
        ledger.record_evaluation(-1, {"eval/exact_match": 1.0, f"eval/{EVIL}": 1.0}, [sample])
        ledger.record_metrics(0, {f"reward/{EVIL}": 1.0, EVIL: 2.0, "time/<blink>x</blink>_s": 1.0})
        ledger.record_event("<script>", why=EVIL)
        text = write_report(ledger, "failed: <script>alert(2)</script>").read_text()
    parsed = Page(text)
    assert parsed.open == [] and not {"script", "img", "blink"} & set(parsed.tags)
    assert any("alert('x')" in data for data in parsed.text) and "{{ 7*7 }}" in text


def test_a_run_that_has_done_nothing_yet(tmp_path):
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        text = render_html(ledger)
    assert "No step is finished yet." in text and "still running, or killed" in text
    assert Page(text).open == []


def test_a_reader_can_write_it_during_the_run(tmp_path):
    with make_run(tmp_path / "run", steps=2), Ledger.reader(tmp_path / "run") as reader:
        assert write_report(reader).exists()


def test_incidents_are_listed_and_marked_on_the_charts(tmp_path):
    ledger = make_run(tmp_path / "run", steps=3)
    at = ledger.commits()[1].at  # in the third step
    stall = {
        "number": 1, "change": "told", "level": "confirmed", "verdict": "absent", "cause": "unknown",
        "who": ["policy-1"], "text": "policy-1 is in score() at <reward.py>:31", "since_s": 0.0, "said_at": at + 1e-9,
        "incident": "/elsewhere/runs/x/incidents/20261121-231502-absent-policy-1",
    }  # fmt: skip
    assert "Incidents" not in render_html(ledger) and "var(--warn)" not in "".join(drawings(render_html(ledger)))
    ledger.record_event("stall", **stall)
    ledger.record_event(
        "recovery", action="gave up", at=at + 2, worker="engine-0", what="died (SIGKILL)", reason="5 are spent"
    )
    folder = ledger.folder / "incidents" / "20261121-231502-absent-policy-1"
    folder.mkdir(parents=True)
    odd = {"severity": "warning", "seen": "NCCL_TIMEOUT=<1> is read by nobody", "why": "It is not there."}
    (folder / "findings.json").write_text(json.dumps({"environment": [odd]}))
    page = render_html(ledger)
    assert Page(page).open == []
    text = " ".join(" ".join(Page(page).text).split())
    for expected in (
        "environment: 1 remark", "NCCL_TIMEOUT=<1> is read by nobody. It is not there.",
        "2 of them not healed", "Steps done over the time the run was up", "policy-1 absent, in step 3", "unresolved",
        "+0.0 s confirmed policy-1 is in score() at <reward.py>:31", "engine-0 died (SIGKILL)", "the run gave up",
        "gave up 5 are spent",
    ):  # fmt: skip
        assert expected in text, expected
    assert 'href="./incidents/20261121-231502-absent-policy-1/story.txt"' in page
    assert all("var(--bad)" in each and ">1<" in each and ">2<" in each for each in drawings(page))
    ledger.close()


def drawings(page):
    """The drawings, with their rules of the page's style sheet where these apply."""
    rules = dict(re.findall(r'\[data-style="(\d+)"\] \{ (.*?) \}', page))
    whole = re.sub(r'data-style="(\d+)"', lambda match: f'style="{rules[match[1]]}"', page.partition("<body>")[2])
    return re.findall(r"<svg.*?</svg>", whole, re.DOTALL)


def test_the_reward_on_held_out_prompts_is_shown(tmp_path):
    with make_run(tmp_path / "run", steps=4) as ledger:
        assert "held-out prompts" in render_html(ledger) and "Reward on held-out prompts" not in render_html(ledger)
        for step, reward in ((-1, 0.3125), (3, 0.7813)):
            ledger.record_evaluation(step, {"eval/reward_mean": reward}, [])
        page = render_html(ledger)
    assert "Reward on held-out prompts" in page
    assert re.search(r"held-out reward</div>.*?0\.781.*?from 0\.312", page, re.DOTALL)


def test_curves(tmp_path):
    with make_run(tmp_path / "run", steps=40) as ledger:
        curves = metric_curves(ledger.metrics_rows(), ledger.evaluations())
    assert [step for step, _ in curves["eval/exact_match"]] == [0, 20, 40]
    assert [step for step, _ in curves["reward/mean"]] == list(range(1, 41))


def test_non_finite_values_leave_gaps():
    curve = [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]
    drawn = draw_chart(Chart("x", ("a", "b"), log=True), {"a": curve, "b": [(0, math.nan)]})
    assert drawn is not None and drawn.legend == [("a", 1, "2")]
    assert draw_chart(Chart("x", ("b",)), {"b": [(0, math.nan)]}) is None


def test_smoothing_keeps_a_constant_and_does_not_lag():
    assert [value for _, value in smoothed([(x, 3.0) for x in range(100)])] == pytest.approx([3.0] * 100)
    line = smoothed([(x, float(x)) for x in range(300)])
    assert [value for _, value in line[60:-60]] == pytest.approx([float(x) for x in range(60, 240)])
    assert smoothed([(0, math.nan)]) == []


def test_long_runs_stay_small():
    points = [(step, float(step % 2)) for step in range(200_000)]
    thin = thinned(points)
    assert len(thin) == 1000 and thin[0] == (99.5, 0.5) and thin[-1] == (199_899.5, 0.5)
    drawn = draw_chart(Chart("x", ("a",)), {"a": points})
    assert drawn is not None and len(drawn.svg) < 60_000


def test_conversations_are_shown_turn_by_turn(tmp_path):
    said = [
        {"role": "assistant", "content": "<calc>1+1</calc>"},
        {"role": "tool", "name": "calculator", "content": "two"},
        {"role": "assistant", "content": "so 2"},
    ]
    with make_run(tmp_path / "run", steps=1) as ledger:
        ledger.record_evaluation(0, {}, [CompletionSample("1+1", "so 2", messages=said)])
        text = " ".join(Page(render_html(ledger)).text)
    assert "<calc>1+1</calc>" in text and "tool calculator" in text and "two" in text
