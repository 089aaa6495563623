"""A run of two trained roles: killed in any stage, it ends with the same weights of both."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import ALPHABET, Launched, build_once, config, seeded_random, task, weights, write
from safetensors.numpy import load_file
from test_recovery import kill_worker, memory_of, pid_of, recoveries, replacements, wait_for_restarts, why
from transformers import AutoModelForCausalLM

from benchmarks.launched_run import Ended
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

STEPS = 6
RECIPE = {"recipe": "two_roles"}
STAGES = ("train", "critic", "copy", "checkpoint")
STEP_S = 0.1
"""About how long the roles train in a step."""
WORKERS = ("policy-0", "policy-1", "critic-0")


@dataclass(frozen=True)
class Pair:
    """An undisturbed run of two roles, and the folder of its models and data."""

    home: Path
    run: Path

    def start(self, folder: Path, hold: dict[str, Any] | None = None, **changes: Any) -> Launched:
        """Start the same run again, in another folder."""
        values = settings(self.home, folder=str(folder / "runs"), **changes)
        return Launched.start(folder / "runs" / "two", str(write(folder, values)), hold=RECIPE | (hold or {}))


def settings(home: Path, **changes: Any) -> dict[str, Any]:
    """Six steps with checkpoints after the third and the last. The critic is another model on one rank."""
    critic = {"model": {"path": str(home / "value")}, "trainer": {"threads": 1, "optimizer": {"lr": 1e-2}}}
    values = config(home, "sft", name="two", steps=STEPS, evaluation=None, batch_size=8)
    return {**values, "recipe": "two_roles", "critic": critic, **changes}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "reference"

    def make(home: Path) -> None:
        task(home)
        shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32}
        make_tiny(home / "value", **shape, max_length=32, alphabet=ALPHABET, seed=7)
        launched = Launched.start(home / "runs" / "two", str(write(home, settings(home))), hold=RECIPE)
        assert launched.finish() == 0, launched.text()

    home = build_once(shared / "two_roles", make)
    return Pair(home, home / "runs" / "two")


def state(run: Path, role: str) -> dict[str, bytes]:
    """All tensors of a role in the last checkpoint: weights and optimizer."""
    files = sorted((run / "checkpoints" / f"{STEPS:08d}" / role).glob("*.safetensors"))
    return {f"{name} of {file.stem}": tensor.tobytes() for file in files for name, tensor in load_file(file).items()}


def assert_same(launched: Launched, pair: Pair, generation: int = 1) -> None:
    """Check that the run ended by itself, with the same weights and metrics of both roles, and nothing else on disk."""
    assert launched.finish() == 0, launched.text()
    for role in ("policy", "critic"):
        assert state(launched.folder, role) == state(pair.run, role), role
    assert weights(launched.folder) == weights(pair.run)
    for metric in ("loss", "before"):
        assert losses(launched.folder, metric) == losses(pair.run, metric)
    left = [path.name for path in launched.folder.rglob("*") if ".tmp" in path.name or path.suffix == ".parts"]
    assert left == []
    with Ledger.reader(launched.folder) as ledger:
        assert ledger.generation == generation


def losses(run: Path, name: str = "loss") -> list[tuple[float, float]]:
    with Ledger.reader(run) as ledger:
        return [(row.values[f"policy/{name}"], row.values[f"critic/{name}"]) for row in ledger.metrics_rows()]


def test_both_roles_learn(pair: Pair) -> None:
    found = losses(pair.run)
    assert len(found) == STEPS
    assert all(last < first for first, last in zip(found[0], found[-1], strict=True))
    assert {path.name for path in (pair.run / "checkpoints" / "00000003").iterdir()} == {"policy", "critic"}
    assert state(pair.run, "policy").keys() != state(pair.run, "critic").keys()


@pytest.mark.timeout(300)
def test_a_rank_of_each_role_is_killed_in_one_run(pair: Pair, tmp_path: Path) -> None:
    """Only the ranks of the failed role are replaced, and both roles are rolled back to the same version."""
    launched = pair.start(tmp_path, {"stage": "critic", "seconds": 0.2, "at_end": False})
    launched.wait_for("critic", 1)
    critic = pid_of(launched, "critic-0")
    kill_worker(launched, "policy-1")  # noticed when both have learnt from this step and are to copy their state
    wait_for_restarts(launched)
    launched.wait_for("critic", 4)
    assert pid_of(launched, "critic-0") == critic, "kept"
    policy = pid_of(launched, "policy-0.1")
    for description in memory_of(launched).glob("state/critic/*.json"):
        description.unlink()
    kill_worker(launched, "critic-0")
    wait_for_restarts(launched, 2)
    launched.wait_for("critic", 5)
    assert pid_of(launched, "policy-0.1") == policy, "kept"
    kill_worker(launched, "critic-0.1", seconds=0.3)
    assert_same(launched, pair)
    assert replacements(launched.folder) == ["critic-0.1", "critic-0.2", "policy-0.1", "policy-1.1"]
    found = [(each["worker"], each["role"], each["restored"], each["again"]) for each in recoveries(launched.folder)]
    assert found == [("policy-1", "policy", 1, 0), ("critic-0", "critic", 3, 1), ("critic-0.1", "critic", 5, 0)]


def wait_for_a_moment(launched: Launched, step: int, chance: random.Random) -> None:
    """Wait for any moment of a step in which both roles are trained."""
    launched.wait_for("train", step)
    time.sleep(chance.uniform(0.0, STEP_S))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_either_role_is_killed_while_both_are_trained(pair: Pair, tmp_path: Path) -> None:
    """The ranks of the other role finish their steps and are kept."""
    chance = seeded_random("roles", "together")
    launched = pair.start(tmp_path, together=True)
    wait_for_a_moment(launched, 1, chance)
    policy = pid_of(launched, "policy-0")
    kill_worker(launched, "critic-0")
    wait_for_restarts(launched)
    wait_for_a_moment(launched, 3, chance)
    assert pid_of(launched, "policy-0") == policy, "kept"
    kill_worker(launched, "policy-1")
    assert_same(launched, pair)
    assert replacements(launched.folder) == ["critic-0.1", "policy-0.1", "policy-1.1"]
    assert [each["role"] for each in recoveries(launched.folder)] == ["critic", "policy"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(6))
def test_ranks_are_killed_at_random_moments_while_both_roles_are_trained(
    pair: Pair, tmp_path: Path, number: int
) -> None:
    chance = seeded_random("roles", "together", number)
    launched = pair.start(tmp_path, together=True, recovery={"memory_copy": chance.random() < 0.5})
    first, second = sorted(chance.sample(range(STEPS), 2))
    with contextlib.suppress(Ended):
        wait_for_a_moment(launched, first, chance)
        for name in chance.sample(WORKERS, chance.choice((1, 1, 2))):
            kill_worker(launched, name, seconds=chance.choice((0.0, 0.5)))
        wait_for_restarts(launched)
        wait_for_a_moment(launched, second, chance)
        latest = [each for each in (f"{chance.choice(WORKERS)}{end}" for end in (".1", "")) if launched.beacon(each)]
        with contextlib.suppress(ProcessLookupError):
            kill_worker(launched, latest[0])
    assert_same(launched, pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_of_the_other_role_is_stuck_when_one_is_killed(pair: Pair, tmp_path: Path) -> None:
    """The wait for the other role's step ends when a verdict names the rank that holds it up."""
    watch = {"notice_s": 1.0, "confirm_after_s": 2.0}
    launched = pair.start(tmp_path, {"stage": "train", "seconds": 0.3, "at_end": False}, together=True, watch=watch)
    launched.wait_for("train", 2)
    os.kill(pid_of(launched, "policy-1"), signal.SIGSTOP)
    kill_worker(launched, "critic-0")
    assert_same(launched, pair)
    assert replacements(launched.folder) == ["critic-0.1", "policy-0.1", "policy-1.1"]
    found = [(each["worker"], each["restored"]) for each in recoveries(launched.folder)]
    assert found == [("critic-0", 2), ("policy-1", 2)]
    assert "is stopped" in why(launched.folder, "policy-1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_any_copy_both_roles_begin_anew(pair: Pair, tmp_path: Path) -> None:
    """The critic has learnt since; only new ranks have the state before the first step."""
    hold = {"stage": "train", "seconds": 0.2, "at_end": False}
    launched = pair.start(tmp_path, hold, recovery={"memory_copy": False})
    launched.wait_for("train", 1)
    kill_worker(launched, "policy-0")
    wait_for_restarts(launched)
    launched.wait_for("train", 4)
    kill_worker(launched, "critic-0.1")
    assert_same(launched, pair)
    found = [(each["worker"], each["restored"], each["again"]) for each in recoveries(launched.folder)]
    assert found == [("policy-0", 0, 1), ("critic-0.1", 3, 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_run_is_killed_when_one_part_of_a_checkpoint_is_complete(pair: Pair, tmp_path: Path) -> None:
    """One part is no version of the run, which resumes from its beginning."""
    part = "checkpoints/00000003.parts/critic"
    launched = pair.start(tmp_path, {"file": str(tmp_path / "runs" / "two" / part)})
    launched.wait_for_file(launched.folder, part)
    launched.kill()
    with Ledger.reader(launched.folder) as ledger:
        assert ledger.checkpoints() == []
    launched = Launched.resume(launched.folder, hold=RECIPE)
    assert_same(launched, pair, generation=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_roles_fall_back_if_one_part_is_damaged(pair: Pair, tmp_path: Path) -> None:
    launched = pair.start(tmp_path, {"stage": "train", "seconds": 0.2, "at_end": False})
    launched.wait_for("train", 4)
    launched.kill()
    newest, damaged = launched.folder / "checkpoints" / "00000003", launched.folder / "checkpoints" / "00000004"
    shutil.copytree(newest, damaged)
    (damaged / "critic" / "checkpoint.json").unlink()
    with Ledger.resume(launched.folder) as ledger:
        assert [row.path for row in ledger.checkpoints()] == [newest]
        ledger.record_checkpoint(3, damaged)
    launched = Launched.resume(launched.folder, hold=RECIPE)
    assert_same(launched, pair, generation=3)
    assert f"resuming from {newest} instead" in " ".join(launched.text().split())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_of_either_role_are_killed_at_random(pair: Pair, tmp_path: Path, stage: str) -> None:
    chance = seeded_random("roles", stage)
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    copies = chance.random() < 0.5 or stage == "copy"
    launched = pair.start(tmp_path, hold, recovery={"memory_copy": copies})
    first, second = sorted(chance.sample(range(STEPS), 2))
    launched.wait_for(stage, first)
    kill_worker(launched, chance.choice(WORKERS), seconds=chance.choice([0.0, 0.5]))
    with contextlib.suppress(Ended):
        wait_for_restarts(launched)
        launched.wait_for(stage, second)
        latest = [each for each in (f"{chance.choice(WORKERS)}{end}" for end in (".1", "")) if launched.beacon(each)]
        with contextlib.suppress(ProcessLookupError):
            kill_worker(launched, latest[0])
    assert_same(launched, pair)


def adapters(pair: Pair, adapter: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes with which the critic trains an adapter."""
    model = {"path": str(pair.home / "value"), "adapter": adapter, **changes}
    return {"critic": {"model": model, "trainer": {"threads": 1, "optimizer": {"lr": 1e-2}}}}


@pytest.mark.slow
def test_one_of_the_trained_models_is_exported(pair: Pair, tmp_path: Path) -> None:
    command = "import two_roles; from lockstep.__main__ import main; main()"
    for role, export in (("critic", "critic/export"), ("policy", "export")):
        subprocess.run(
            [sys.executable, "-c", command, "export", str(pair.run), str(tmp_path / role), "--role", role],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, check=True, timeout=120,
        )  # fmt: skip
        exported, own = (folder / "model.safetensors" for folder in (tmp_path / role, pair.run / export))
        assert exported.read_bytes() == own.read_bytes()
    wrong = ["export", str(pair.run), str(tmp_path / "x"), "--role", "judge"]
    refused = subprocess.run(
        [sys.executable, "-c", command, *wrong], env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "--role judge: the run trains policy, critic" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_critic_trains_an_adapter_which_another_run_starts_from(pair: Pair, tmp_path: Path) -> None:
    """Both runs are killed; the second has no adapter's settings in its file."""
    fresh = adapters(pair, {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}, packing="block")
    straight = pair.start(tmp_path / "straight", together=True, **fresh)
    assert straight.finish() == 0, straight.text()
    name = "critic/adapter/adapter_model.safetensors"
    launched = pair.start(tmp_path / "killed", {"stage": "train", "seconds": 0.2, "at_end": False}, **fresh)
    launched.wait_for("train", 2)
    kill_worker(launched, "critic-0")
    launched.wait_for("train", 4)
    launched.kill()
    launched = Launched.resume(launched.folder, hold=RECIPE)
    assert launched.finish() == 0, launched.text()
    assert (launched.folder / name).read_bytes() == (straight.folder / name).read_bytes()
    assert (
        "critic: packing block: prompts are not shared (set by critic.model.packing)"
        in (straight.folder / "logs/controller.log").read_text()
    )

    further = adapters(pair, {"path": str(straight.folder / "critic" / "adapter")})
    launched = pair.start(tmp_path / "further", {"stage": "train", "seconds": 0.2, "at_end": False}, **further)
    launched.wait_for("train", 4)
    launched.kill()
    launched = Launched.resume(launched.folder, hold=RECIPE)
    assert launched.finish() == 0, launched.text()
    with Ledger.reader(launched.folder) as ledger:
        adapter = ledger.config()["critic"]["model"]["adapter"]
    assert (adapter["r"], adapter["target_modules"]) == (4, ["q_proj", "v_proj"])
    before, after = (load_file(run.folder / name) for run in (straight, launched))
    assert before.keys() == after.keys() and any((before[key] != after[key]).any() for key in before)
    assert losses(launched.folder, "before")[0][1] > losses(pair.run, "before")[0][1], "it begins where the first ended"
    assert AutoModelForCausalLM.from_pretrained(launched.folder / "critic" / "export").num_parameters()


@pytest.mark.slow
def test_an_adapter_of_the_critic_that_does_not_exist_is_refused(pair: Pair, tmp_path: Path) -> None:
    refused = pair.start(tmp_path, **adapters(pair, {"path": "nowhere/adapter"}))
    assert refused.finish() == 2, refused.text()
    assert "critic.model.adapter.path = 'nowhere/adapter'" in " ".join(refused.printed().split())
    assert not refused.folder.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
@pytest.mark.timeout(300)
def test_ranks_of_both_roles_are_killed_on_ray(pair: Pair, tmp_path: Path) -> None:
    placement = {"policy": {"cpus": 0.25}, "critic": {"cpus": 0.25, "nodes": 1}}
    hold = {"stage": "critic", "seconds": 0.3, "at_end": False}
    launched = pair.start(tmp_path, hold, cluster="ray", placement=placement)
    launched.wait_for("critic", 1)
    kill_worker(launched, "critic-0")
    wait_for_restarts(launched)
    launched.wait_for("critic", 4)
    kill_worker(launched, "policy-0.1")
    assert_same(launched, pair)
    found = [(each["worker"], each["restored"]) for each in recoveries(launched.folder)]
    assert found == [("critic-0", 0), ("policy-0.1", 3)], "there are no copies in memory on Ray"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["evaluate", "publish"])
def test_ranks_are_killed_while_engines_serve_the_policy(pair: Pair, tmp_path: Path, stage: str) -> None:
    """A kept policy publishes as before, and a new one the versions that engines do not have yet."""
    evaluation = {"data": {"path": str(pair.home / "data" / "grpo.jsonl"), "limit": 16}, "every": 2}
    hold = {"stage": stage, "seconds": 0.3, "at_end": False}
    launched = pair.start(tmp_path, hold, evaluation=evaluation)
    launched.wait_for(stage, 1)
    kill_worker(launched, "critic-0")
    wait_for_restarts(launched)
    launched.wait_for(stage, 3)
    kill_worker(launched, "policy-1")
    assert_same(launched, pair)
    assert replacements(launched.folder) == ["critic-0.1", "policy-0.1", "policy-1.1"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_both_roles_are_killed_at_the_same_time(pair: Pair, tmp_path: Path) -> None:
    launched = pair.start(tmp_path, {"stage": "train", "seconds": 0.3, "at_end": False})
    launched.wait_for("train", 2)
    for name in ("policy-1", "critic-0"):
        os.kill(pid_of(launched, name), signal.SIGKILL)
    assert_same(launched, pair)
    assert {each["role"] for each in recoveries(launched.folder, "failed")} == {"policy", "critic"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [*STAGES, "start", "pack", "export"])
def test_the_controller_is_killed_and_the_run_resumed(pair: Pair, tmp_path: Path, stage: str) -> None:
    chance = seeded_random("roles", "controller", stage)
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    launched = pair.start(tmp_path, hold)
    launched.wait_for(stage, None if stage in ("start", "export") else chance.randrange(STEPS))
    launched.kill_controller()
    assert launched.has_ended(20.0)
    launched = Launched.resume(launched.folder, hold=RECIPE)
    assert_same(launched, pair, generation=2)
