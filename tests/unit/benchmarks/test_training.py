"""The benchmark of the trainer's step: the same work on every side."""

from pathlib import Path

import pytest

from benchmarks.training import LockstepStep, PaddedStep, trees
from benchmarks.workloads import TOY, WORKS, prepare, quick


@pytest.mark.parametrize("name", ["fixed", "sft"])
def test_both_sides_have_the_same_sequences(name: str, tmp_path: Path) -> None:
    work = quick(WORKS[name])
    prepare(work, tmp_path, 1, TOY)
    made = trees(work)
    paths = sum(max(1, len(tree) - 1) for tree in made)
    padded = PaddedStep(work, tmp_path / "model", 2)
    lengths = [int(size) for _, mask in padded._batches for size in mask.sum(1)]
    assert len(lengths) == paths == work.completions
    assert all(leaf.parent == 0 for tree in made for leaf in tree[1:])
    assert sum(lengths) == sum(
        tree[0].tokens.size + leaf.tokens.size if leaf is not tree[0] else leaf.tokens.size
        for tree in made
        for leaf in tree[1:] or tree
    )
    padded()
    LockstepStep(work, tmp_path / "model")()
