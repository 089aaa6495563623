"""Runs with environments and tools, as a user starts them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, task, train, weights, write
from test_bad_input import refused

from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

pytestmark = [pytest.mark.xdist_group("environments"), pytest.mark.timeout(600)]

WORLD = '''
import time

class Echo:
    """Two turns; the second is worth what the first one said."""

    def __init__(self, bad=""):
        self.bad, self.turn = bad, 0

    def reset(self, prompt):
        self.first = prompt.text[0]
        return "+"

    def step(self, action):
        self.turn += 1
        if self.bad and prompt_is_bad(self):
            if self.bad == "raise":
                raise RuntimeError("no such world")
            time.sleep(1000)
        return __import__("lockstep.rollout.environments").rollout.environments.Observation(
            "=", reward=float(self.first in action), done=self.turn == 2
        )


def prompt_is_bad(world):
    return world.first == "7" and world.turn == 2


def length(text: str) -> int:
    """Says how long a text is.

    Args:
        text: The text.
    """
    return len(text)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = task(tmp_path_factory.mktemp("worlds"))
    (home / "world.py").write_text(WORLD)
    return home


def grpo(home: Path, name: str, environment: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rollout = {
        "sampling": {"max_tokens": 14, "stop": list("02468")},
        "engine": {"max_rows": 32, "threads": 1},
        "environment": {"max_turn_tokens": 4, **environment},
    }
    terms = [{"kind": "environment"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]
    given: dict[str, Any] = {"rollout": rollout, "reward": {"terms": terms}, "steps": 3, **changes}
    return config(home, "grpo", name=name, **given)


@pytest.mark.slow
def test_a_run_with_an_environment_that_branches(folder: Path) -> None:
    values = grpo(folder, "branching", {"path": f"{folder}/world.py:Echo", "branches": [2]}, steps=2)
    run = folder / "runs" / "branching"
    launched = Launched.start(run, str(write(folder, values)))
    assert launched.finish() == 0, launched.text()
    with Ledger.reader(run) as ledger:
        rows = {row.step: row.values for row in ledger.metrics_rows()}
        samples, kept = ledger.evaluations()[-1].samples, ledger.samples()
        stored = ledger.rollouts(1)
    assert [rows[step]["rollout/turns_max"] for step in range(2)] == [2.0] * 2
    assert all(rows[step]["reward/environment/mean"] == rows[step]["environment/reward"] for step in range(2))
    assert 0 < rows[0]["rollout/environment_tokens_mean"] < rows[0]["rollout/length_mean"]
    assert samples[0].messages[0] == {"role": "user", "content": "+"}
    assert [turn["role"] for turn in kept[-1].samples[0].messages] == ["user", "assistant", "user", "assistant"]
    assert re.search(
        r"^samples of step 2\n  prompt +\S.*\n  user +\+\n  assistant  .*\n  user +=$", launched.printed(), re.M
    )
    assert stored is not None
    for group in stored.groups:
        firsts = [tuple(each.tokens[: int(each.mask.argmin()) or 2]) for each in group.completions]
        assert firsts[0] == firsts[1] and firsts[2] == firsts[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad, words", [("raise", "raised RuntimeError: no such world"), ("hang", "did not answer within")]
)
def test_a_failing_environment_is_reported_with_sample_turn_and_line_and_the_run_resumes(
    folder: Path, bad: str, words: str
) -> None:
    environment = {"path": f"{folder}/world.py:Echo", "arguments": {"bad": bad}, "on_error": "stop", "timeout_s": 2}
    run = folder / "runs" / bad
    launched = Launched.start(run, str(write(folder, grpo(folder, bad, environment))))
    assert launched.finish() == 1
    text = " ".join(launched.printed().split())
    assert words in text and "sample" in text and "turn 2" in text and "world.py" in text
    assert f"lockstep train --resume {run}" in text
    world = folder / "world.py"
    world.write_text(WORLD.replace('world.first == "7"', "False"))
    try:
        again = Launched.resume(run)
        assert again.finish() == 0, again.text()
    finally:
        world.write_text(WORLD)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"path": "{}/world.py:Ecco"}, ["defines no 'Ecco'"]),
        ({"path": "nowhere.py:World"}, ["environment nowhere.py:World", "there is no file"]),
        (
            {"tools": ["{}/world.py:length"]},
            ["about rollout.environment.tools", "data.chat=true"],
        ),
        ({"tools": ["{}/world.py:prompt_is_bad"]}, ["prompt_is_bad", "has no docstring"]),
        ({"tools": ["{}/world.py:length"], "path": "x.py:X"}, ["either path (an environment's class) or tools"]),
        ({"tools": ["{}/world.py:length"], "parser": "regex"}, ["a pattern belong together"]),
        ({"path": "{}/world.py:Echo", "branches": [3]}, ["branches [3] makes 3 conversations", "group_size 4"]),
    ],
)
def test_unusable_environments_are_refused(folder: Path, environment: dict[str, Any], words: list[str]) -> None:
    given = json.loads(json.dumps(environment).replace("{}", str(folder)))
    printed = refused(folder, "train", str(write(folder / "files", grpo(folder, "bad", given))))
    assert all(word in printed for word in words), printed


def test_the_reward_of_an_environment_needs_one(folder: Path) -> None:
    values = config(folder, "grpo", name="bad", reward={"terms": [{"kind": "environment"}]})
    assert "no rollout.environment" in refused(folder, "train", str(write(folder / "files", values)))


@pytest.mark.parametrize(
    ("writes", "problem"),
    [("{% if tools %}{{ tools | length }}{% endif %}", "no tools here"), ("", "the chat template does not write them")],
)
def test_a_chat_template_without_tools_is_refused(folder: Path, tmp_path: Path, writes: str, problem: str) -> None:
    make_tiny(tmp_path / "model", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=64, chat=True)
    template = tmp_path / "chat.jinja"
    template.write_text(
        writes + "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    values = grpo(folder, "bad", {"tools": [f"{folder}/world.py:length"]})
    values["model"] = {"path": str(tmp_path / "model"), "chat_template": str(template)}
    values["data"] = {**values["data"], "chat": True}
    values["evaluation"]["data"]["chat"] = True
    printed = refused(folder, "train", str(write(folder / "files", values)))
    assert problem in printed and "model.chat_template" in printed


def pictures_run(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A run on two ranks. Prompts have no image, and the conversations of every other row have none either."""
    if not (home / "model").exists():
        make_tiny_vision(home / "model", family="qwen3_vl", alphabet="abcdefgh?", max_length=192, seed=3)
        (home / "world.py").write_text(PICTURES)
        rows = [{"prompt": text} for text in ("ab?", "cd?", "ef?", "gh?")]
        (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"path": f"{home}/world.py:Pictures", "max_images": 2, "max_turns": 3}
    return {
        "recipe": "grpo", "name": name, "folder": str(home / "runs"), "steps": 2, "prompts_per_step": 2,
        "group_size": 2, "token_budget": 192, "model": {"path": str(home / "model")},
        "data": {"path": str(home / "data.jsonl"), "chat": True, "shuffle": False},
        "rollout": {"sampling": {"max_tokens": 160, "stop": list("abcdefgh?")}, "environment": environment,
                    "engine": {"threads": 1}},
        "reward": {"terms": [{"kind": "environment"}]}, "trainer": {"ranks": 2},
        "checkpoint": {"every": 2, "keep_last": 2}, "loss": {"old_logprobs": "trainer"}, **changes,
    }  # fmt: skip


def test_an_environment_that_answers_with_images(tmp_path: Path) -> None:
    run = train(tmp_path, pictures_run(tmp_path, "pictures"))
    with Ledger.reader(run) as ledger:
        metrics = [row.values for row in ledger.metrics_rows()]
        stored, samples = [ledger.rollouts(step) for step in range(2)], ledger.samples()[-1].samples
    assert len(metrics) == 2 and all(math.isfinite(row["policy/loss"]) for row in metrics)
    assert all(row["policy/engine_gap_max"] < 1e-4 for row in metrics)
    counts = [[len(each.images) for each in group.completions] for step in stored for group in step.groups]
    assert all(any(row) == (number % 2 == 0) for number, row in enumerate(counts)), counts
    for each in (each for step in stored for group in step.groups for each in group.completions):
        assert not any(each.mask[image.places].any() for image in each.images)
    assert {path.suffix for path in (run / "images").rglob("*.*")} == {".observed", ".safetensors", ".json"}
    assert any(sample.images for sample in samples) and "data:image/png" in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_killed_run_repeats_its_steps_with_the_same_pictures(tmp_path: Path) -> None:
    """Also if the prepared images are lost: they are made again from the files that the environment answered with."""
    expected = weights(train(tmp_path, pictures_run(tmp_path, "whole", steps=4)))
    values = pictures_run(tmp_path, "killed", steps=4)
    launched = Launched.start(tmp_path / "runs" / "killed", str(write(tmp_path, values)))
    launched.wait_for("train", 3)
    launched.kill()
    prepared = list((launched.folder / "images").rglob("*.safetensors"))
    for path in prepared:
        path.unlink()
    assert prepared
    resumed = Launched.resume(launched.folder)
    assert resumed.finish() == 0, resumed.text()
    assert weights(launched.folder) == expected


PICTURES = '''
import random
from PIL import Image
from lockstep.rollout.environments import Observation

class Pictures:
    """Answers with a picture in every other conversation of a row."""

    def __init__(self):
        self.turn = 0

    def reset(self, prompt):
        self.row = prompt.row
        return Observation("?")

    def step(self, action):
        self.turn += 1
        if self.row % 2:
            return Observation("b", reward=float(len(action) % 2), done=self.turn == 2)
        pixels = random.Random(self.row + self.turn).randbytes(3 * 32 * 32)
        return Observation("a<image>b", images=[Image.frombytes("RGB", (32, 32), pixels)], reward=2.0 + ("a" in action))
'''
