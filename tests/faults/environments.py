"""Environments and tools for the tests: some answer, others raise, return wrong values, hang or crash."""

import asyncio
import ctypes
import os
import time

from lockstep.rollout.environments import Observation


class Counting:
    """Counts its turns; ends after three."""

    def __init__(self, until=3):
        self.until, self.turns = until, 0

    def reset(self, prompt):
        return f"begin {prompt.uid}. "

    def step(self, action):
        self.turns += 1
        return Observation(f"[{self.turns}:{action}]", reward=0.5, done=self.turns == self.until, metrics={"seen": 1})


class Slow:
    """Async, without a reset: replies after the number of seconds in the action."""

    async def step(self, action):
        await asyncio.sleep(float(action))
        return Observation(f"waited {action}", done=False)


class Faulty(Counting):
    """Fails in the way that the action names."""

    def step(self, action):
        if action == "raise":
            raise RuntimeError("the world ended")
        if action == "nothing":
            return None
        if action == "nan":
            return Observation("x", reward=float("nan"))
        if action == "hang":
            time.sleep(1000)
        if action == "held":
            ctypes.PyDLL(None).sleep(1000)
        if action == "exit":
            os._exit(7)
        return super().step(action)


class AsyncFaulty(Faulty):
    """Async; `sleep` never ends but can be cancelled, `hang` blocks the event loop."""

    async def step(self, action):
        if action == "sleep":
            await asyncio.sleep(1000)
        return super().step(action)


class Dice:
    """Is not deterministic: replies with another text each time."""

    def step(self, action):
        if action == "exit":
            os._exit(7)
        return Observation(f"{time.monotonic_ns()}")


class NoReset:
    def step(self, action):
        return Observation(reward=1.0, done=True)


class NoStep:
    def reset(self, prompt):
        return None


class BadReset:
    def reset(self, prompt):
        raise KeyError("no such world")

    def step(self, action):
        return ""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first one.
        b: The second one,
            on two lines.
    """
    return a * b


async def slow_echo(text: str) -> str:
    """Returns the text.

    Args:
        text: What to return.
    """
    await asyncio.sleep(0.01)
    return text


def breaks(text: str) -> str:
    """Raises.

    Args:
        text: Anything.
    """
    raise ZeroDivisionError("no such quotient")


def never(text: str) -> str:
    """Never returns.

    Args:
        text: Anything.
    """
    time.sleep(1000)
    return text
