"""The page of `lockstep dashboard` in a real browser: each view, hostile text, its address, keyboard, narrow screens,
lost connections, and 1,000 ranks with 10,000 steps."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness import Launched, config, task, write

from benchmarks.chromium import CHROMIUM, BrowserPage, Chromium
from benchmarks.dashboard_page import (
    GOAL_TASK_MS,
    VIEWS,
    make_processes,
    make_run,
    open_view,
    run_ids,
    served,
    show_many_gpus,
    use,
)
from lockstep.base.folders import run_shm_dir
from lockstep.ledger import CompletionSample, Ledger
from lockstep.watch.beacon.writer import close_beacon
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry

pytest.importorskip("fastapi", reason="needs lockstep-rl[dashboard]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; on Debian: apt-get install chromium"),
]

HERE = Path(__file__).parent
RANKS, STEPS, FEW_STEPS = 1000, 10_000, 300
_TAGS = "</script><img src=x onerror=\"document.title='owned'\"><style>body{display:none}</style>"
EVIL = f"{_TAGS}\u202egnp.exe javascript:alert(1)"
SEEN = f"{_TAGS}[U+202E]gnp.exe javascript:alert(1)"
"""As the page shows it: what would turn the direction of the text is spelled out."""
SPOKEN = "[document.title, ...[...document.querySelectorAll('[aria-label], [title]')].map(e => e.ariaLabel + e.title)]"
SOURCES = "[...document.querySelectorAll('img, script, style, iframe, object')].map(e => e.src || e.tagName)"
HANDLERS = "document.querySelectorAll('[style*=javascript], [href^=javascript], [onerror], [onload]').length"
UNNAMED = """[...document.querySelectorAll('button, input, select')].map(e => [e, e.labels?.[0]?.textContent])
  .filter(([e, label]) => !(e.ariaLabel || e.textContent.trim() || label?.trim())).map(([e]) => e.outerHTML)"""
INJECTED = '<img src=x onerror="document.title=1"><p style="color:red">'
PLOT = "(b => [b.left, b.top, b.width])(document.querySelector('.plot').getBoundingClientRect())"
PLOT_LABEL = "document.querySelector('.plot').ariaLabel"
TICK_SECOND = """[...document.querySelectorAll('#runs li')].find(e => e.innerText.includes('second'))
  .querySelector('input').click()"""
LONG = "word " * 200_000


def hostile_run(folder: Path) -> None:
    """A run whose every text is hostile, and a prompt of a megabyte."""
    with Ledger.create(folder, {"recipe": EVIL, "name": EVIL, "steps": 3, "model": {"path": EVIL}}) as ledger:
        samples = [CompletionSample(EVIL, EVIL, EVIL, 1.0, {EVIL: 1.0}, EVIL, EVIL)]
        samples += [CompletionSample(LONG, "short", "two", 0.0, {}, "two", "stop")]
        for step in range(3):
            ledger.record_metrics(step, {f"reward/{EVIL}": 1.0, "reward/mean": 0.1 * step, "time/a_s": 1.0})
            ledger.commit(step, {})
            changed = CompletionSample(EVIL, f"{EVIL} and so on {step}", EVIL, 1.0, {}, EVIL, "stop")
            ledger.record_evaluation(step, {"eval/exact_match": 1.0}, [changed, *samples[1:]] if step else samples)
        stall = {
            "number": 1, "change": "told", "level": "confirmed", "verdict": "absent", "cause": EVIL, "who": [EVIL],
            "text": EVIL, "since_s": 0.0, "said_at": ledger.commits()[1].at, "incident": f"javascript:alert(1)//{EVIL}",
        }  # fmt: skip
        ledger.record_event("stall", **stall)
        ledger.record_event("end", reason="finished")
    late_ranks(folder, (EVIL, "policy-1"))


def late_ranks(folder: Path, names: tuple[str, ...]) -> None:
    """Totals of 100 calls on two communicators: the last process is 20 ms late in most, and 400 ms in every tenth."""
    totals = ArrivalTotals(folder / "communication.json", "r")
    totals.describe({1: ("all_reduce", 4 << 20)})
    for call in range(100):
        late_ns = 400_000_000 if call % 10 == 9 else 20_000_000
        for rank, name in enumerate(names):
            at = call * 10**9 + (late_ns if rank == len(names) - 1 else 0)
            key = "tp" if call % 2 else "dp"
            totals.add(key, key, "gloo", len(names), (0, call), rank, name, Entry("h", at, 10**9, 1, 0, False))
    totals.write(0.0, last=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Ten thousand durable commits take a minute on a disk and seconds in memory.
    memory = Path("/dev/shm")
    root = tmp_path_factory.mktemp("runs")
    scale = (memory / f"lockstep-test-{root.name}-{id(root):x}" if memory.is_dir() else root) / "scale"
    run = ""
    try:
        hostile_run(root / "a-hostile")
        make_run(root / "b-first", FEW_STEPS, 24, "first", {"seed": 1})
        make_run(root / "c-second", FEW_STEPS, 24, "second", {"seed": 2, "loss": {"clip_high": 0.3}})
        late_ranks(root / "b-first", ("policy-0", "policy-1", "policy-2"))
        scale.parent.mkdir(exist_ok=True)
        make_run(scale, STEPS)
        run = make_processes(scale, RANKS)
        (root / "scale.path").write_text(str(scale))
        yield root
    finally:
        close_beacon()
        if run:
            shutil.rmtree(run_shm_dir(run), ignore_errors=True)
        if memory in scale.parents:
            shutil.rmtree(scale.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs, Path((runs / "scale.path").read_text())) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as found:
        yield found


@pytest.fixture
def page(browser: Chromium) -> Iterator[BrowserPage]:
    found = browser.page()
    yield found
    found.close()


@pytest.fixture(scope="module")
def ids(address: str, browser: Chromium) -> dict[str, str]:
    """Ids of the runs by the names of their folders."""
    first = browser.page()
    open_view(first, address, "config")
    found = run_ids(first, address)
    first.close()
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_text_stays_text(view: str, address: str, ids: dict[str, str], page: BrowserPage) -> None:
    open_view(page, address, view, f"&runs={ids['a-hostile']}")
    shown = page.until("document.body.innerText.includes('gnp.exe') && document.body.innerText")
    assert SEEN in shown and "\u202e" not in shown + page.run(f"{SPOKEN}.join()")
    if view == "samples":
        page.run("document.querySelector('.sample button').click()")
        page.until("document.querySelectorAll('.compare ins').length")
        assert page.run("document.querySelector('.compare ins').textContent").strip() == "and so on 2"
        assert page.run("document.querySelectorAll('.compare del').length") == 0
        assert page.until("document.body.innerText.includes('word word word')")
    files = [f"{address.partition('#')[0]}{name}" for name in ("app.js", "icon.svg")]
    assert page.run(SOURCES) == files and page.run(HANDLERS) == 0
    assert "owned" not in page.run("document.title").replace("onerror=\"document.title='owned'\"", "")
    assert page.refused() == [] and page.gather() == []


def test_an_injection_would_be_refused(address: str, page: BrowserPage) -> None:
    open_view(page, address, "config")
    page.run(f"document.body.insertAdjacentHTML('beforeend', '{INJECTED}')")
    assert page.until("window.__refused.length > 1 && window.__refused")
    assert page.run("document.title") != "1"


def test_the_address_restores_what_is_shown_and_never_holds_the_token(
    address: str, ids: dict[str, str], page: BrowserPage
) -> None:
    chosen = f"&runs={ids['b-first']}&runs={ids['c-second']}"
    open_view(page, address, "curves", f"{chosen}&find=reward&metrics=policy%2Fkl&smooth=0.6&log=1")
    page.until("document.querySelectorAll('.chart .legend .swatch').length > 3")
    left, top, width = page.run(PLOT)
    page.drag((left + width * 0.4, top + 80), (left + width * 0.6, top + 80))
    fragment = page.until("location.hash.includes('from=') && location.hash")
    first, last = (int(re.search(rf"{name}=(\d+)", fragment)[1]) for name in ("from", "to"))  # type: ignore[index]
    assert FEW_STEPS * 0.2 < first < last < FEW_STEPS * 0.8
    assert "token" not in page.run("location.href") and address.partition("token=")[2] not in fragment
    page.do("Page.reload")
    page.until("document.querySelectorAll('.chart .legend .swatch').length > 3")
    assert page.run("location.hash") == fragment
    groups = page.run("[...document.querySelectorAll('.group span')].map(e => e.textContent)")
    assert groups == ["pinned", "reward", "time"]
    assert page.run("document.querySelector('input[type=range]').value") == "0.6"
    assert page.run("document.querySelector('.toolbar input[type=checkbox]').checked")
    assert f"steps {first} to {last}" in page.until(f"{PLOT_LABEL}.includes('steps') && {PLOT_LABEL}")
    page.run("document.querySelector('.toolbar .button').click()")
    page.until("!location.hash.includes('from=')")


def test_the_curves_of_two_runs_are_overlaid_and_told_apart(
    address: str, ids: dict[str, str], page: BrowserPage
) -> None:
    """Each run has a colour and dashes of its own, in the list and in every chart; unticking one takes it away."""
    open_view(page, address, "curves", f"&runs={ids['b-first']}&runs={ids['c-second']}&find=reward%2Fmean")
    page.until("document.querySelectorAll('.chart .legend .swatch').length === 2")
    assert page.run("document.querySelector('.chart .legend').innerText").split()[::2] == ["first", "second"]
    looks = page.run(
        "[...document.querySelectorAll('.chart .legend .swatch')].map(e => e.outerHTML + getComputedStyle(e).color)"
    )
    assert len(set(looks)) == 2
    page.run(TICK_SECOND)
    page.until("document.querySelectorAll('.chart .legend .swatch').length < 2")


ROWS_SHOWN = (
    "[...document.querySelectorAll('.config tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_differs_between_configs(scheme: str, address: str, ids: dict[str, str], page: BrowserPage) -> None:
    page.prefer(scheme)
    open_view(page, address, "config", f"&runs={ids['b-first']}")
    page.until("document.querySelectorAll('.config tbody tr').length > 5")
    assert "Tick a second run" in page.run("document.querySelector('.toolbar .note').textContent")
    page.run(TICK_SECOND)
    page.until("document.querySelectorAll('.config thead th').length === 3")
    page.until("document.querySelectorAll('.config tbody tr').length === 3")
    assert page.run(ROWS_SHOWN) == [
        ["setting", "first", "second"], ["loss", "–", '{"clip_high":0.3}'], ["name", "first", "second"],
        ["seed", "1", "2"],
    ]  # fmt: skip
    assert page.run("document.querySelector('.toolbar .note').textContent") == "3 settings that differ"
    cells = page.run(
        "[...document.querySelectorAll('.config td')]"
        ".map(e => [e.className, getComputedStyle(e.firstChild).backgroundColor])"
    )
    plain, marked = ([shade for kind, shade in cells if kind == wanted] for wanted in ("", "differs"))
    assert len(marked) == 3 and not set(plain) & set(marked)
    page.run("document.getElementById('config-find').value = 'SEED'")
    page.run("document.getElementById('config-find').dispatchEvent(new Event('input'))")
    page.until("document.querySelectorAll('.config tbody tr').length === 1")
    assert page.gather() == []


def test_the_matrix_has_the_quantiles_of_late_arrivals(address: str, ids: dict[str, str], page: BrowserPage) -> None:
    """Over both communicators: 100 calls, of which ten are 400 ms late and the others 20 ms."""
    open_view(page, address, "communication", f"&runs={ids['b-first']}")
    page.until("document.querySelector('.matrix')")
    cells = page.run("[...document.querySelectorAll('.matrix tbody tr')].map(r => [...r.cells].map(c => c.innerText))")
    assert [row[0] for row in cells] == ["policy-0", "policy-1", "policy-2"]
    assert cells[0][1:] == cells[1][1:] == ["", "", ""] and cells[2][3] == ""
    for cell in cells[2][1:3]:
        seconds, p50, p99 = map(float, re.fullmatch(r"([\d.]+) s\s+([\d.]+) / ([\d.]+) ms", cell).groups())  # type: ignore[union-attr]
        assert seconds == pytest.approx(5.8, abs=0.05)
        assert (p50, p99) == (pytest.approx(20, rel=0.05), pytest.approx(400, rel=0.05))
    pairs = page.run(
        "[...document.querySelector('[aria-label=Pairs]').querySelectorAll('tbody tr')].map(r => r.cells[0].innerText +"
        " ' ' + r.cells[1].innerText + ' ' + r.cells[2].innerText)"
    )
    assert sorted(pairs) == sorted(f"{of} policy-2 policy-{rank}" for of in ("dp", "tp") for rank in (0, 1))


def test_every_control_is_reached_and_left_by_keyboard(address: str, ids: dict[str, str], page: BrowserPage) -> None:
    open_view(page, address, "curves", f"&runs={ids['b-first']}")
    page.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for name in ("Stages", "Waits"):
        page.key("ArrowRight")
        page.until(f"document.activeElement.textContent === '{name}' && document.activeElement.ariaSelected === 'true'")
    page.key("Home")
    page.until("document.querySelector('.plot')")
    page.key("?", "?")
    page.until("document.querySelector('dialog').open")
    page.key("Escape")
    page.until("!document.querySelector('dialog').open")
    page.key("/", "/")
    assert page.until("document.activeElement.id === 'curves-find'")
    page.run("document.activeElement.blur()")
    page.key("t", "t")
    assert page.run("document.documentElement.dataset.theme") == "light"
    page.until(f"{PLOT_LABEL}.includes('steps')")
    page.run("document.querySelector('.plot').focus()")
    page.key("ArrowLeft")
    page.until(r"/step \d/.test(document.querySelector('.chart .at').textContent)")
    page.key("+", "+")
    page.until("location.hash.includes('from=')")
    page.run("window.__stops = []; document.activeElement.blur()")
    for _ in range(60):
        page.key("Tab")
        page.run("__stops.push(document.activeElement)")
    assert page.run("new Set(__stops).size") > 20, "the focus is caught"
    assert page.run(UNNAMED) == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_screen_needs_no_scrolling_sideways(
    view: str, address: str, ids: dict[str, str], page: BrowserPage
) -> None:
    page.size(360, 740)
    page.prefer("dark", reduced_motion=True)
    open_view(page, address, view, f"&runs={ids['scale']}&runs={ids['a-hostile']}")
    page.until("document.querySelector('#live').dataset.state === 'live'")
    assert page.run("document.documentElement.scrollWidth") == 360
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
    page.run("document.getElementById('theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"


def test_a_lost_connection_is_shown_and_made_again(runs: Path, page: BrowserPage) -> None:
    with served(runs / "b-first") as found:
        open_view(page, found, "curves")
        page.until("document.querySelector('#live').dataset.state === 'live'")
    page.until("document.querySelector('#live').textContent.includes('stale since')")
    port = urlsplit(found).port
    assert port is not None
    with served(runs / "b-first", port=port):
        page.until("document.querySelector('#live').dataset.state === 'live'", 60)
        page.until("document.querySelectorAll('.chart .legend b').length")
    assert page.run("document.querySelector('#notice').hidden")


def test_a_wrong_token_is_asked_for_again(address: str, page: BrowserPage) -> None:
    page.open(re.sub("token=.*", "token=wrong", address))
    page.until("document.getElementById('token-input')")
    token = urlsplit(address).fragment.removeprefix("token=")
    page.run(f"document.getElementById('token-input').value = '{token}'")
    page.run("document.querySelector('.token button').click()")
    page.until("document.querySelectorAll('#runs li').length > 2 && document.querySelector('#notice').hidden")


@pytest.mark.parametrize("view", VIEWS)
def test_a_large_run_never_keeps_the_main_thread(view: str, address: str, ids: dict[str, str]) -> None:
    """On the CPU: by the clock, other processes of a busy machine would count, too. See benchmarks.dashboard_page."""
    with Chromium() as browser:
        page = browser.page()
        browser.trace()
        open_view(page, address, view, f"&runs={ids['scale']}")
        use(page, view)
        tasks = browser.traced_tasks()
    longest = max(cpu for _, cpu in tasks)
    assert len(tasks) > 20 and longest < GOAL_TASK_MS, sorted((cpu for _, cpu in tasks), reverse=True)[:5]


def test_a_thousand_processes_are_few_nodes_and_all_lanes(address: str, ids: dict[str, str], page: BrowserPage) -> None:
    open_view(page, address, "waits", f"&runs={ids['scale']}")
    page.until("document.querySelector('.node .label')")
    labels = page.run("[...document.querySelectorAll('.node .label')].map(e => e.textContent)")
    assert 2 <= len(labels) < 24 and any("policy 0–16, 18–999" in each for each in labels)
    open_view(page, address, "stages", f"&runs={ids['scale']}")
    page.until("document.querySelector('.toolbar .note').textContent.startsWith('1,12')")
    assert page.run("document.querySelectorAll('canvas').length") == 1, "only lanes in sight are painted"


OUTSIDE = """(graph => [...graph.querySelectorAll('.node, .caption, .link')].filter(e => {
  const [at, all] = [e.getBoundingClientRect(), graph.getBoundingClientRect()];
  return at.left < all.left || at.right > all.right; }).length)(document.querySelector('.graph'))"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_graph_of_waits_needs_no_scrolling_sideways(
    width: int, address: str, ids: dict[str, str], page: BrowserPage
) -> None:
    page.size(width, 800)
    open_view(page, address, "waits", f"&runs={ids['scale']}")
    page.until("document.querySelector('.node .label')")
    for element in ("document.documentElement", "document.querySelector('.graph')"):
        assert page.run(f"{element}.scrollWidth <= {element}.clientWidth"), element
    assert page.run(OUTSIDE) == 0 and page.run("document.querySelectorAll('.link').length") > 0
    page.size(390 + 1280 - width, 800)
    page.until(f"document.querySelector('.graph svg').clientWidth {'<' if width == 1280 else '>'} 400")
    assert page.run(OUTSIDE) == 0, "it is laid out anew for another width"
    assert page.gather() == []


def test_a_thousand_gpus_are_drawn_in_slices(address: str, page: BrowserPage) -> None:
    open_view(page, address, "hosts")
    show_many_gpus(page)
    assert page.until("view.element.innerText.includes('125 hosts, 1,000 GPUs, 125 errors')")
    assert page.run("view.element.querySelectorAll('.gpu').length") < 400, "only hosts in sight are filled"
    page.run("view.rank.value = 'errors'; view.rank.dispatchEvent(new Event('change'))")
    page.run("window.scrollTo(0, document.body.scrollHeight)")
    page.until("view.element.querySelector('[data-host=node-124] .gpu')")


def test_parts_of_the_page(address: str, page: BrowserPage) -> None:
    open_view(page, address, "config")
    assert page.run((HERE / "dashboard_parts.js").read_text()) == []


def test_the_graph_of_a_rank_that_is_really_stopped(tmp_path: Path, page: BrowserPage) -> None:
    """The rank stands in red where the arrow from its peer ends, until the run has replaced it; then it is an
    incident."""
    home = task(tmp_path)
    values = config(home, "grpo", name="stopped", steps=10_000, watch={"notice_s": 2.0})
    launched = Launched.start(tmp_path / "runs" / "stopped", str(write(home, values)))
    try:
        launched.wait_for("train", 3)
        with served(launched.folder) as found:
            open_view(page, found, "waits")
            page.until("document.querySelector('.node .label')")
            rank = launched.beacon("policy-1")
            assert rank is not None
            os.kill(rank.pid, signal.SIGSTOP)
            page.until("document.querySelector('.verdict')?.textContent.includes('is stopped')", 60)
            assert page.run("document.querySelector('.verdict .pill').textContent") == "policy-1"
            assert "policy-1" in page.until("document.querySelector('.node[aria-label*=culprit]')?.ariaLabel")
            page.until("document.querySelector('.tabs .count')?.textContent === '1'", 60)
            open_view(page, found, "incidents")
            assert "policy-1" in page.until("document.querySelector('.incident')?.textContent", 60)
            for view, part in (("hosts", "host"), ("samples", "sample"), ("communication", "matrix")):
                open_view(page, found, view)
                page.until(f"document.querySelector('.{part}')")
            assert page.gather() == []
    finally:
        launched.kill()
