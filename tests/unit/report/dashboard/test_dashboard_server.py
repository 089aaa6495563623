"""What each address answers, for one run, for several, and for runs that change or vanish."""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import CONFIG, add_steps, ask, make_run, run_id, server_of

from lockstep.ledger import Ledger
from lockstep.report.dashboard.dashboard_server import THREADS, DashboardServer
from lockstep.report.dashboard.run_catalogue import NothingToShow, RunCatalogue
from lockstep.report.dashboard.run_feed import RunFeed, RunOverview
from lockstep.report.dashboard.run_overviews import LOOKS_AT_ONCE
from lockstep.report.dashboard.shown_run import ShownRun

SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", 30, end="finished")
    other = {**CONFIG, "name": "<b>b</b>", "seed": 1, "trainer": {"optimizer": {"lr": 0.01}}}
    make_run(folder / "b", 10, config=other)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> DashboardServer:
    return server_of(folder)


def answer(server: DashboardServer, path: str, number: int = 0) -> Any:
    found = ask(server, f"/api/runs/{run_id(server, number)}/{path}")
    assert found.status_code == 200, found.text
    return found.json()


def test_runs_are_listed_with_what_they_have_done(server: DashboardServer, folder: Path) -> None:
    a, b = ask(server, "/api/runs").json()["runs"]
    assert set(a) == {"id", "name", "recipe", "folder", "state", "step", "steps", "started", "updated", "message"}
    assert (a["name"], a["state"], a["step"], a["steps"], a["folder"]) == ("a", "finished", 30, 40, str(folder / "a"))
    assert b["name"] == "<b>b</b>", "names are text, which the page shows as it is"
    assert a["id"] != b["id"] and "/" not in a["id"]


def test_metrics_and_curves(server: DashboardServer) -> None:
    found = answer(server, "metrics")
    assert found["steps"] == 30
    assert {"name": "time/train_s", "group": "time", "unit": "s"} in found["names"]
    curves = answer(server, "series?name=reward/mean&name=policy/loss&name=unknown&from=5&to=24&points=10")["series"]
    assert set(curves) == {"reward/mean", "policy/loss"}
    loss = curves["policy/loss"]
    assert len(loss["steps"]) == 10 and loss["high"][0] == 0.2 and loss["low"][-1] == pytest.approx(1 / 24)


def test_several_runs_are_overlaid(server: DashboardServer) -> None:
    ids = [run_id(server, 0), run_id(server, 1)]
    both = ask(server, [f"/api/runs/{each}/series?name=policy/loss" for each in ids] * 3)
    assert [each.status_code for each in both] == [200] * 6
    assert [len(each.json()["series"]["policy/loss"]["steps"]) for each in both] == [30, 10] * 3


def test_stages_waits_hosts_and_incidents_of_an_ended_run(server: DashboardServer) -> None:
    chart = answer(server, "stages?from=0")
    assert chart["rows"] == [{"role": "run", "name": "run"}]
    assert {span["stage"] for span in chart["spans"]} == {"rollout", "train"}
    assert answer(server, "waits") == {
        "nodes": [], "edges": [], "verdict": None, "live": False, "message": "the run is finished"
    }  # fmt: skip
    assert answer(server, "hosts") == {"hosts": [], "history": {}}
    assert answer(server, "incidents") == {"incidents": []}
    communication = answer(server, "communication")
    assert communication["communicators"] == [] and communication["matrix"] is None


def test_samples_are_listed_searched_and_cut(server: DashboardServer) -> None:
    found = answer(server, "samples?limit=2")
    assert found["steps"] == list(range(31)) and found["total"] == 4
    first, second = found["samples"]
    assert (first["kind"], first["prompt_id"], first["step"], first["reward"]) == ("train", "p:29", 30, 1.0)
    assert (second["kind"], second["completion"]) == ("evaluation", "<script>alert(1)</script>")
    (last,) = answer(server, "samples?offset=3&chars=100")["samples"]
    assert len(last["completion"]) == 100 and last["cut"] == 5900
    hits = answer(server, "samples?query=COMPLETION 7")
    assert [each["step"] for each in hits["samples"]] == [8] and hits["complete"] is True
    assert answer(server, "samples?query=nothing at all&step=3")["total"] == 0


def test_samples_of_a_prompt_are_compared_between_steps(server: DashboardServer) -> None:
    found = answer(server, "samples/diff?prompt_id=e:1&a=0&b=30")
    assert [each["completion"] for side in "ab" for each in found[side]] == ["after 0 steps", "after 30 steps"]


def test_configs_have_no_secrets_and_are_compared(server: DashboardServer) -> None:
    config = answer(server, "config")["config"]
    assert config["trainer.optimizer.lr"] == 0.001 and config["trainer.optimizer.betas"] == [0.9, 0.99]
    assert config["reward.terms.0.api_key"] == "[hidden]"
    a, b = run_id(server, 0), run_id(server, 1)
    changed = {each["key"]: each for each in ask(server, f"/api/diff?a={a}&b={b}").json()["changed"]}
    assert changed["trainer.optimizer.lr"] == {"key": "trainer.optimizer.lr", "a": 0.001, "b": 0.01}
    assert changed["seed"] == {"key": "seed", "b": 1}
    assert changed["trainer.optimizer.betas"] == {"key": "trainer.optimizer.betas", "a": [0.9, 0.99]}
    assert ask(server, f"/api/diff?a={a}&b={a}").json() == {"changed": []}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("series?name=a&points=1", "points"), ("series?name=a&points=x", "points"), ("series", "name"),
        ("series?name=a&from=-1", "from"), ("samples?step=x", "step"), ("samples?limit=0", "limit"),
        ("samples?offset=-1", "offset"), ("samples?chars=99999999", "chars"), ("samples/diff?prompt_id=x&a=1", "b"),
        ("stages?from=soon", "from"), ("samples?query=" + "x" * 1001, "query"), ("incidents/x/file", "name"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(server: DashboardServer, path: str, field: str) -> None:
    found = ask(server, f"/api/runs/{run_id(server)}/{path}")
    assert found.status_code == 400 and found.json()["error"]["field"] == field


@pytest.mark.parametrize("path", ["metrics", "series?name=a", "stages", "waits", "samples", "config"])
def test_an_unknown_run_is_named(server: DashboardServer, path: str) -> None:
    found = ask(server, f"/api/runs/0123456789ab/{path}")
    assert found.status_code == 404 and found.json()["error"]["field"] == "run"
    assert ask(server, "/api/events?run=0123456789ab").status_code == 404


def test_a_run_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0)
    server = server_of(folder)
    name = run_id(server)
    with Ledger.resume(folder) as ledger:
        for done in range(1, 8):
            add_steps(ledger, done - 1, done)
            many = ask(server, [f"/api/runs/{name}/series?name=policy/loss", "/api/runs"] * 4)
            assert all(each.status_code == 200 for each in many)
            assert many[0].json()["series"]["policy/loss"]["steps"] == list(range(1, done + 1))
            assert many[1].json()["runs"][0]["state"] == "running"


def test_a_run_that_vanishes_is_gone_and_one_that_appears_is_there(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "a", 2)
    server = server_of(runs)
    name = run_id(server)
    make_run(runs / "b", 2)
    (runs / "note.txt").write_text("no run")
    assert [each["name"] for each in ask(server, "/api/runs").json()["runs"]] == ["a", "b"]
    shutil.rmtree(runs / "a")
    found = ask(server, f"/api/runs/{name}/config")
    assert found.status_code == 410 and found.json()["error"]["remedy"] == "choose another run"
    assert [each["name"] for each in ask(server, "/api/runs").json()["runs"]] == ["b"]
    shutil.rmtree(runs)
    assert ask(server, "/api/runs").json() == {"runs": []}


def test_a_damaged_ledger_is_an_error_of_that_run_alone(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "runs" / "good", 2), make_run(tmp_path / "runs" / "zbad", 2)
    server = server_of(tmp_path / "runs")
    name = run_id(server, 1)
    (bad / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    for wal in bad.glob("ledger.sqlite-*"):
        wal.unlink()
    assert [each["name"] for each in ask(server, "/api/runs").json()["runs"]] == ["good"]
    found = ask(server, f"/api/runs/{name}/metrics")
    assert found.status_code == 409 and "cannot be read" in found.json()["error"]["message"]
    assert good.exists()


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Folders by name whose overviews are not read until their event is set."""
    folders: dict[str, threading.Event] = {}
    overview = RunFeed.overview

    def answer(feed: RunFeed) -> RunOverview:
        if feed.folder.name in folders:
            folders[feed.folder.name].wait(120)
        return overview(feed)

    monkeypatch.setattr(RunFeed, "overview", answer)
    monkeypatch.setattr("lockstep.report.dashboard.run_overviews.ANSWER_S", 0.5)
    yield folders
    for event in folders.values():
        event.set()


def names(server: DashboardServer) -> list[str]:
    return [each["name"] for each in ask(server, "/api/runs").json()["runs"]]


def test_a_folder_that_hangs_holds_up_no_other_run(tmp_path: Path, hung: dict[str, threading.Event]) -> None:
    runs = tmp_path / "runs"
    for name in "abcd":
        make_run(runs / name, 2)
    server = server_of(runs)
    hung["a"] = threading.Event()
    first, *others = ask(server, "/api/runs").json()["runs"]
    assert (first["name"], first["state"], first["message"]) == ("a", "unknown", "its folder has not answered yet")
    assert [(each["name"], each["state"], each["step"]) for each in others] == [(name, "running", 2) for name in "bcd"]
    began = time.monotonic()
    assert all(names(server) == ["a", "b", "c", "d"] for _ in range(20))
    assert time.monotonic() - began < 20 * 0.5, "only the first list waits for it"
    assert len(server._overviews._looks) == 1, "and only one thread"
    hung.pop("a").set()
    until(lambda: ask(server, "/api/runs").json()["runs"][0]["state"] == "running")


def test_a_run_whose_folder_hangs_is_listed_as_it_was(tmp_path: Path, hung: dict[str, threading.Event]) -> None:
    server = server_of(make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 2))
    assert names(server) == ["a", "b"]
    hung["a"] = threading.Event()
    with Ledger.resume(tmp_path / "b") as ledger:
        add_steps(ledger, 2, 5)
    assert [each["step"] for each in ask(server, "/api/runs").json()["runs"]] == [2, 5]


def test_many_folders_that_hang_leave_threads_to_other_requests(
    tmp_path: Path, hung: dict[str, threading.Event]
) -> None:
    runs = tmp_path / "runs"
    for number in range(LOOKS_AT_ONCE + 3):
        make_run(runs / f"{number:02d}", 2)
    server = server_of(runs)
    assert len(names(server)) == LOOKS_AT_ONCE + 3, "all, with fewer threads"
    chosen = run_id(server, LOOKS_AT_ONCE + 2)
    hung.update({f"{number:02d}": threading.Event() for number in range(LOOKS_AT_ONCE + 2)})
    for _ in range(3):
        assert len(names(server)) == LOOKS_AT_ONCE + 3
    assert len(server._overviews._looks) == LOOKS_AT_ONCE < THREADS
    assert ask(server, f"/api/runs/{chosen}/series?name=reward/mean").status_code == 200


def test_a_run_that_is_removed_while_another_list_waits_is_in_that_list_only(
    tmp_path: Path, hung: dict[str, threading.Event]
) -> None:
    runs = tmp_path / "runs"
    for number in range(LOOKS_AT_ONCE + 1):
        make_run(runs / f"{number:02d}", 2)
    server = server_of(runs)
    hung.update({f"{number:02d}": threading.Event() for number in range(LOOKS_AT_ONCE)})

    async def overlapping() -> list[list[dict[str, Any]]]:
        first = asyncio.create_task(server._overviews.read())
        while len(server._overviews._looks) < LOOKS_AT_ONCE:  # the last run has to wait for a thread
            await asyncio.sleep(0.01)
        shutil.rmtree(runs / f"{LOOKS_AT_ONCE:02d}")
        second = asyncio.create_task(server._overviews.read())
        while len(server._overviews._shown) > LOOKS_AT_ONCE:
            await asyncio.sleep(0.01)
        hung["00"].set()
        return [await first, await second]

    counts = [len(each) for each in asyncio.run(overlapping())]
    assert counts == [LOOKS_AT_ONCE, LOOKS_AT_ONCE], "the one that waited found it removed"


def test_a_listing_that_hangs_leaves_the_runs_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hung: dict[str, threading.Event]
) -> None:
    server = server_of(make_run(tmp_path / "a", 2))
    assert names(server) == ["a"]
    answers = threading.Event()
    find = RunCatalogue.runs

    def runs(catalogue: RunCatalogue) -> dict[str, ShownRun]:
        answers.wait(120)
        return find(catalogue)

    monkeypatch.setattr(RunCatalogue, "runs", runs)
    assert names(server) == ["a"]
    with Ledger.resume(tmp_path / "a") as ledger:
        add_steps(ledger, 2, 5)
    assert ask(server, "/api/runs").json()["runs"][0]["step"] == 5
    answers.set()


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "missing", "no such folder"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(NothingToShow, match=why):
            RunCatalogue([path])


def test_a_ledger_of_somebody_else_may_hold_anything(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "a", 2, end="finished")
    with Ledger.create(runs / "b", {**CONFIG, "name": "half \ud83d", "steps": "many", "model": None}) as ledger:
        ledger.record_event("stall", number="one")
        ledger.record_event("recovery", action="failed")
        ledger.record_metrics(0, {"good": 1.0})
        ledger.commit(0, {})
        values = '{"good": 1.0, "text": "x", "list": [1], "none": null, "huge": 1e999}'
        with ledger._index.transaction() as transaction:
            transaction.put("metrics", step=0, values=values)
    server = server_of(runs)
    a, b = ask(server, "/api/runs").json()["runs"]
    assert (a["name"], b["steps"]) == ("a", "many")
    views = "metrics", "series?name=good&name=text", "stages", "hosts", "samples", "config", "waits", "incidents"
    found = {view: ask(server, f"/api/runs/{b['id']}/{view}") for view in views}
    assert {view for view, each in found.items() if each.status_code != 200} <= {"incidents", "waits"}
    assert all(each.status_code in (200, 409) for each in found.values())
    assert list(found["series?name=good&name=text"].json()["series"]) == ["good"]


def test_another_run_in_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    make_run(tmp_path / "run", 12)
    path = f"/api/runs/{run_id(server)}/series?name=reward/mean"
    before = ask(server, path).json()["series"]["reward/mean"]["values"]
    shutil.rmtree(tmp_path / "run")
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        for step in range(20):
            ledger.record_metrics(step, {"reward/mean": 7.0})
            ledger.commit(step, {})
    assert before != [7.0] * 12 and ask(server, path).json()["series"]["reward/mean"]["values"] == [7.0] * 20


def test_metrics_of_all_runs_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.report.dashboard.run_catalogue.METRIC_BYTES", 1500)
    for name in "abc":
        make_run(tmp_path / name, 20)
    catalogue = RunCatalogue([tmp_path])
    for name, shown in 3 * list(catalogue.runs().items()):
        assert catalogue.run(name) is shown
        assert shown.feed.metric_names()[1] == 20 and len(shown.feed.curves(["reward/mean"], None, None, 99)) == 1
    sizes = [shown.feed.size for shown in catalogue.runs().values()]
    assert sizes.count(0) >= 1 and max(sizes) > 0
