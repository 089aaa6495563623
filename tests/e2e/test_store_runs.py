"""A run is killed, its machine is lost, and another one resumes it from the store alone: with the same result."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from forked_controller import ENVIRONMENT
from harness import Launched
from resume_scenarios import InterruptedRun, References, metrics

from lockstep.ledger.ledger import Ledger
from lockstep.ledger.store.manifest import newest_manifest
from lockstep.ledger.store.object_store import open_store
from s3_server import KEYS


def kill_when_stored(run: InterruptedRun, url: str, step: str) -> None:
    """Stops the workers when a step file is written, and kills the run when its store has the file."""
    launched = Launched.start(run.run, str(run.file), cold=True)
    launched.wait_for_file(run.run, f"steps/{step}.arrow")
    for worker in launched.members():
        if worker.pid != launched.process.pid:
            worker.suspend()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        newest = newest_manifest(open_store(url))
        if newest is not None and any(file.path == f"steps/{step}.arrow" for file in newest.files):
            launched.kill()
            return
        time.sleep(0.05)
    pytest.fail("the store never got the step")


def resumed_elsewhere(reference: References, tmp_path: Path, base: str) -> None:
    run = InterruptedRun(reference("grpo"), tmp_path, "grpo", store=base)
    url = f"{base}/{run.run.name}"
    kill_when_stored(run, url, "00000005")
    shutil.rmtree(run.run.parent)  # the machine is lost
    launched = Launched.start(run.run, "--resume", url, cold=True)
    assert launched.finish() == 0, launched.text()
    run.compare()
    files = {file.path for file in newest_manifest(open_store(url)).files}
    assert {"summary.json", "metrics.jsonl", "export/model.safetensors"} <= files
    with Ledger.reader(run.run) as ledger:
        assert ledger.steps_done() == 8
    assert len(metrics(run.run)) == 8


def test_a_finished_run_uploads_what_its_store_lacks(reference: References, tmp_path: Path) -> None:
    """The store is away when the run ends. The run then fails, and says how to upload the rest later."""
    shared, away = tmp_path / "shared", tmp_path / "away"
    run = InterruptedRun(reference("sft"), tmp_path, "sft", store={"url": f"file://{shared}", "finish_s": 1.0})
    launched = Launched.start(run.run, str(run.file))
    launched.wait_for_file(run.run, "checkpoints/*/checkpoint.json")
    launched.process.send_signal(signal.SIGSTOP)
    shared.rename(away)
    shared.write_text("no folder any more")
    launched.process.send_signal(signal.SIGCONT)
    assert launched.finish() == 1 and f"Upload them with: lockstep train --resume {run.run}" in launched.printed()
    assert json.loads((run.run / "summary.json").read_text())["exit_reason"] == "finished"

    shared.unlink()
    away.rename(shared)
    launched = Launched.resume(run.run)
    assert launched.finish() == 0, launched.text()
    url = f"file://{shared}/{run.run.name}"
    files = {file.path for file in newest_manifest(open_store(url)).files}
    assert {"summary.json", "metrics.jsonl", "export/model.safetensors"} <= files
    run.compare()
    for from_there in (str(run.run), url):
        launched = Launched.start(run.run, "--resume", from_there)
        assert launched.finish() == 0 and "is finished: 8 of 8 steps" in launched.printed()
    shutil.rmtree(run.run)
    launched = Launched.start(run.run, "--resume", url)  # an end that was downloaded is not run again either
    assert launched.finish() == 0 and "is finished: 8 of 8 steps" in launched.printed()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_from_a_shared_folder(reference: References, tmp_path: Path) -> None:
    resumed_elsewhere(reference, tmp_path, f"file://{tmp_path}/shared")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_from_an_s3_server(
    reference: References, tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*KEYS, "AWS_ENDPOINT_URL"):
        monkeypatch.setitem(ENVIRONMENT, name, os.environ[name])
    resumed_elsewhere(reference, tmp_path, s3_url)
