"""The benchmark of the trainer's step: the same work on every side."""

from pathlib import Path

import pytest
import torch

from benchmarks.training import BfdStep, LockstepStep, PaddedStep, trees
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


def test_packed_documents_of_transformers_are_those_of_lockstep_and_isolated(tmp_path: Path) -> None:
    work = WORKS["sft"]
    prepare(work, tmp_path, 1, TOY)
    step = BfdStep(work, tmp_path / "model")
    rows = [tokens.shape[1] for tokens, _ in step.rows]
    assert max(rows) <= work.max_tokens and sum(rows) == sum(tree[0].tokens.size for tree in trees(work))
    tokens, positions = next((tokens, positions) for tokens, positions in step.rows if (positions == 0).sum() > 1)
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
    second, stop = starts[1:3]
    with torch.no_grad():
        packed = step._lm(tokens, position_ids=positions, use_cache=False).logits[0, second:]
        alone = step._lm(tokens[:, second:stop], use_cache=False).logits[0]
    torch.testing.assert_close(packed[: stop - second], alone, rtol=1e-4, atol=1e-5)
    before = next(iter(step._lm.parameters())).clone()
    step()
    assert not torch.equal(before, next(iter(step._lm.parameters())))
