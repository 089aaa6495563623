"""The environment of the documentation."""

import asyncio
import importlib.util
from pathlib import Path

import numpy as np

from lockstep.data.samples import Prompt

FILE = Path(__file__).parents[4] / "examples" / "guess.py"


def test_the_guessing_game() -> None:
    spec = importlib.util.spec_from_file_location("guess", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    world = module.Guess(highest=8)
    prompt = Prompt("0:3", 3, np.array([1], np.int32), "play")
    assert "between 1 and 8" in world.reset(prompt)
    rewards, low, high = [], 1, 8
    while True:
        guess = (low + high) // 2
        answer = asyncio.run(world.step(f"I say {guess}"))
        rewards.append(answer.reward)
        if answer.done:
            break
        low, high = (guess + 1, high) if answer.text == "Higher." else (low, guess - 1)
    assert rewards[-1] == 1 and len(rewards) <= 4
    assert asyncio.run(world.step("no idea")).reward == -0.1
