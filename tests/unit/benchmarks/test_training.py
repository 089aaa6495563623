"""The benchmark of the trainer's step: the same work on every side."""

from pathlib import Path

import pytest

from benchmarks.training import LockstepStep, PaddedStep, trees
from benchmarks.workloads import TOY, WORKS, prepare, quick


@pytest.mark.parametrize("name", ["fixed", "sft"])
def test_both_sides_have_the_same_sequences(name: str, tmp_path: Path) -> None:
    work = quick(WORKS[name])
    prepare(work, tmp_path, 1, TOY)
    paths = sum(max(1, len(tree.segments) - 1) for tree in trees(work))
    padded = PaddedStep(work, tmp_path / "model", 2)
    lengths = [int(size) for _, mask in padded._batches for size in mask.sum(1)]
    assert len(lengths) == paths == work.completions
    assert sum(lengths) == sum(
        sum(tree.segments[i].tokens.size for i in tree.path(leaf))
        for tree in trees(work)
        for leaf in (range(1, len(tree.segments)) if len(tree.segments) > 1 else [0])
    )
    padded()
    LockstepStep(work, tmp_path / "model")()
