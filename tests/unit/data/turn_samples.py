"""Conversations for the tests: completions of several turns, many with common beginnings."""

import numpy as np
from hypothesis import strategies as st

from lockstep.data.samples import Completion, Episode, Group, Prompt, Rollouts

TURNS = ([5], [5, 6], [7, 5, 6], [8])
ANSWERS = ([1], [2, 3])


def conversation(request: str, turns: list[tuple[int, int]], last: int, random: np.random.Generator) -> Completion:
    """Makes a completion. `turns` are (index in TURNS of the model's text, index in ANSWERS of the answer)."""
    parts = [part for own, answer in turns for part in ((TURNS[own], True), (ANSWERS[answer], False))]
    parts.append((TURNS[last], True))
    mask = np.concatenate([np.full(len(tokens), own) for tokens, own in parts])
    return Completion(
        request=request,
        tokens=np.concatenate([tokens for tokens, _ in parts]).astype(np.int32),
        logprobs=np.where(mask, random.normal(size=mask.size), 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        finish="stop",
        text="",
        mask=mask,
        episode=Episode([{"role": "assistant", "content": "x"}], [0.5], "answer", {"calls": 1.0}),
    )


@st.composite
def conversations(draw: st.DrawFn, groups: int = 2, size: int = 4) -> Rollouts:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    turn = st.tuples(st.integers(0, 1), st.integers(0, 1))
    made = []
    for g in range(groups):
        completions = [
            conversation(f"{g}/{k}", draw(st.lists(turn, max_size=3)), draw(st.integers(0, 3)), random)
            for k in range(size)
        ]
        prompt = Prompt(f"0:{g}", g, random.integers(5, 40, 3).astype(np.int32), "")
        made.append(Group(prompt, completions))
    return Rollouts(3, 3, made)
