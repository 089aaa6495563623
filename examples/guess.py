"""An environment: guess a number; the reply says whether the number is higher or lower (docs/environments.md)."""

import random

from lockstep.rollout.environments import Observation


class Guess:
    def __init__(self, highest=100):
        self.highest = highest

    def reset(self, prompt):
        self.number = random.Random(prompt.uid).randint(1, self.highest)
        return f"My number lies between 1 and {self.highest}. Which is it?"

    async def step(self, action):
        words = action.split()
        if not words or not words[-1].isdigit():
            return Observation("End with a number.", reward=-0.1)
        guess = int(words[-1])
        if guess == self.number:
            return Observation("Yes!", reward=1.0, done=True)
        return Observation("Higher." if guess < self.number else "Lower.", metrics={"wrong": 1})
