"""Environments for the tests of conversations."""

import asyncio

from lockstep.rollout.environments import Observation


class Parrot:
    """Replies with the length of the turn; the conversation ends after `turns`."""

    def __init__(self, turns=3, opens=True, delay_s=0.0):
        self.left, self.opens, self.delay_s = turns, opens, delay_s

    async def reset(self, prompt):
        return Observation("ready?") if self.opens else None

    async def step(self, action):
        await asyncio.sleep(self.delay_s)
        self.left -= 1
        if "7" in action and self.delay_s < 0:
            raise ValueError("seven")
        return Observation(f"you wrote {len(action)}.", reward=len(action) / 10, done=self.left == 0)


class Fails:
    """Raises in the second turn."""

    def __init__(self):
        self.turn = 0

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            raise ValueError("not again")
        return Observation("go on", reward=1.0)
