"""Rollouts and a config for tests of the ledger."""

import numpy as np

from lockstep.data.samples import Completion, Group, Prompt, Rollouts

CONFIG = {
    "recipe": "grpo",
    "name": "sort",
    "folder": "runs",
    "seed": 0,
    "steps": 10,
    "trainer": {"ranks": 2, "threads": 1, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999]}},
    "checkpoint": {"every": 5, "keep_last": 2},
}


def make_completion(request: str, length: int = 4, seed: int = 0) -> Completion:
    rng = np.random.default_rng(seed)
    return Completion(
        request=request,
        tokens=rng.integers(0, 1000, length, dtype=np.int32),
        logprobs=-rng.random(length, dtype=np.float32),
        versions=np.full(length, 3, np.int32),
        finish="stop",
        text="1 2 3",
    )


def make_rollouts(step: int, groups: int = 3, size: int = 4, scored: bool = True, length: int = 4) -> Rollouts:
    rng = np.random.default_rng(step)
    made = []
    for index in range(groups):
        uid = f"0:{step * groups + index}"
        made.append(
            Group(
                prompt=Prompt(
                    uid=uid,
                    row=step * groups + index,
                    tokens=rng.integers(0, 1000, 5, dtype=np.int32),
                    text="sort 3 1 2",
                    answer="1 2 3",
                    columns={"level": index},
                ),
                completions=[make_completion(f"{uid}/{k}", length, step * 100 + index * 10 + k) for k in range(size)],
                rewards=rng.random(size, dtype=np.float32) if scored else None,
                breakdown={"exact_match": rng.random(size, dtype=np.float32)} if scored else {},
            )
        )
    return Rollouts(step=step, version=step, groups=made)


def assert_same(left: object, right: object) -> None:
    """Returns whether two values are equal in every field, array, bit and dtype."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif names := getattr(left, "__dataclass_fields__", None) or getattr(left, "__struct_fields__", None):
        for name in names:
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, float):
        assert left == right or (left != left and right != right)
    else:
        assert left == right
