"""Runs with rewards from servers: failures are named, the step is resumed, and no key is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, config, prompts_used, task, write
from reward_server import Reply, chat, serving

from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("bad input"), pytest.mark.timeout(300)]
KEY = ENVIRONMENT["LOCKSTEP_TEST_API_KEY"]


def run_config(folder: Path, url: str) -> dict[str, Any]:
    """A config with two steps on one rank, and rewards from a server, a judge and a schema."""
    quick = {"timeout_s": 20, "deadline_s": 20, "retries": 0, "api_key_env": "LOCKSTEP_TEST_API_KEY"}
    terms = [
        {"kind": "http", "name": "rm", "url": f"{url}/rm", "batch_size": 4, **quick},
        {"kind": "judge", "base_url": f"{url}/v1", "model": "m", "weight": 0.5, **quick},
        {"kind": "json_schema", "definition": {"type": "integer"}, "weight": 0.1},
    ]
    values = config(folder, "grpo", name="remote", steps=2, reward={"terms": terms})
    values |= {"checkpoint": {"every": 0, "export": False}, "evaluation": {**values["evaluation"], "every": 0}}
    values["trainer"]["ranks"] = 1
    return values


def rewards(body: dict[str, Any], path: str) -> Reply:
    if path == "/rm":
        return Reply([float(len(text) % 3) for text in body["completions"]])
    return Reply(chat(f"Score: {len(body['messages'][0]['content']) % 11}"))


def test_a_run_is_rewarded_by_servers(tmp_path: Path) -> None:
    folder = task(tmp_path)
    with serving(lambda number, body, path: rewards(body, path)) as server:
        values = run_config(folder, server.url) | {"steps": 1, "evaluation": None}
        run = Path(values["folder"]) / "remote"
        launched = Launched.start(run, str(write(folder, values)))
        assert launched.finish() == 0, launched.text()
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    has_all_metrics(next(row for row in rows if "policy/loss" in row))
    assert_no_key(run)


def has_all_metrics(row: dict[str, Any]) -> None:
    for term, keys in (("rm", {"latency_s", "retries"}), ("judge", {"latency_s", "retries", "cached", "unreadable"})):
        assert {f"reward/{term}/{key}" for key in keys | {"mean", "std"}} <= row.keys()


def assert_no_key(*folders: Path) -> None:
    for file in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert KEY.encode() not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("tracked", [False, True], ids=["", "tracked"])
def test_a_failing_server_is_named_and_the_run_resumes_with_another(tmp_path: Path, tracked: bool) -> None:
    folder = task(tmp_path)
    requests = 0

    def fails(number: int, body: dict[str, Any], path: str) -> Reply:
        nonlocal requests
        requests += path == "/rm"
        # 16 rows are evaluated first, then 16 completions of step 1, by four in a request
        return Reply(f"no room for {KEY}", 500) if requests > 9 else rewards(body, path)

    with serving(fails) as server:
        values = run_config(folder, server.url)
        if tracked:
            store = {"kind": "mlflow", "uri": str(folder / "mlruns")}
            values["tracking"] = [{"kind": "wandb", "mode": "offline"}, store, {"kind": "prometheus", "port": 0}]
        run = Path(values["folder"]) / "remote"
        launched = Launched.start(run, str(write(folder, values)))
        assert launched.finish() == 1, launched.text()
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    printed = " ".join(launched.printed().split())
    assert (
        f"error reward http: {server.url}/rm answered 500" in printed
        and "no room for [hidden] (4 samples, 0:" in printed
    )
    assert launched.has_ended(10)
    with Ledger.reader(run) as ledger:
        assert (ledger.last_committed_step(), ledger.collected_steps()) == (0, [0]), "no zero in place of a reward"
    with serving(lambda number, body, path: rewards(body, path)) as other:
        ids = (run / "tracking.json").read_text() if tracked else ""
        moved = [f"reward.terms.0.url={other.url}/rm", f"reward.terms.1.base_url={other.url}/v1"]
        launched = Launched.resume(run, *moved)
        assert launched.finish() == 0, launched.text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (again,) = (row for row in rows if row["step"] == 2 and "policy/loss" in row)
    assert sorted(prompts_used(run).values()) == sorted([0, 1] * 4)
    has_all_metrics(again)
    evaluated = [row for row in rows if "eval/reward_mean" in row]
    assert all({"eval/reward/judge/mean", "eval/reward/json_schema/std"} <= row.keys() for row in evaluated)
    if tracked:
        assert (run / "tracking.json").read_text() == ids
        assert len(list((run / "wandb").glob(f"offline-run-*-{json.loads(ids)['wandb']}"))) == 2, "one per attempt"
        assert "status: 3\n" in next((folder / "mlruns").rglob(f"{json.loads(ids)['mlflow']}/meta.yaml")).read_text()
    assert not any(KEY in output.read_text() for output in launched.output.parent.glob("*.out"))
    assert_no_key(run, folder / "mlruns")


@pytest.mark.slow
def test_a_server_that_never_answers_is_named(tmp_path: Path) -> None:
    """A notice names the server while the run waits; after the deadline the run ends, and resumes with another
    address."""
    folder = task(tmp_path)
    with serving(lambda number, body, path: Reply([], after_s=1000)) as server:
        values = run_config(folder, server.url) | {"evaluation": None, "watch": {"notice_s": 1.0}}
        (silent, *_) = values["reward"]["terms"]
        values["reward"] = {"terms": [silent | {"timeout_s": 6, "deadline_s": 6}]}
        run = Path(values["folder"]) / "remote"
        launched = Launched.start(run, str(write(folder, values)))
        assert launched.finish() == 1, launched.text()
    printed = " ".join(launched.printed().split())
    assert f"error reward http: {server.url}/rm" in printed and f"--resume {run}" in printed
    assert launched.has_ended(10)
    with Ledger.reader(run) as ledger:
        stalls = [event.fields for event in ledger.events() if event.kind == "stall"]
        assert ledger.collected_steps() == []
    (notice, *_) = stalls
    address = server.url.removeprefix("http://")
    assert (notice["level"], notice["verdict"]) == ("notice", "absent")
    assert address in notice["text"] and [address in name for name in notice["who"]] == [True], notice
    assert all(each["level"] == "notice" for each in stalls), "no process of the run is accused"


def test_a_judge_without_its_key_starts_nothing(tmp_path: Path) -> None:
    values = run_config(task(tmp_path), "http://127.0.0.1:9")
    values["reward"]["terms"][1]["api_key_env"] = "A_KEY_NOBODY_HAS"
    run = Path(values["folder"]) / "remote"
    launched = Launched.start(run, str(write(tmp_path, values)))
    assert launched.finish() == 2
    printed = " ".join(launched.text().split())
    assert "reward judge: the environment variable A_KEY_NOBODY_HAS, which should hold the key, is not set" in printed
    assert not run.exists()
