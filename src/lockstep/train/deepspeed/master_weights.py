"""Whole master weights, put together from the pieces that the ranks hold."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.train.checkpoints.checkpoint import LocalRows
from lockstep.train.deepspeed.held_rows import split_into_buckets
from lockstep.train.distributed import ParallelContext


@torch.no_grad()
def gather_pieces(ranks: ParallelContext, pieces: Mapping[str, LocalRows]) -> dict[str, Tensor]:
    """Gathers whole tensors in host memory of the first rank, in buckets; returns nothing on other ranks. All ranks
    call it, with the same names.

    Args:
        pieces: of `ZeroState.state`, in float32.
    """
    spans = _gather_spans(ranks, pieces)
    found: dict[str, Tensor] = {}
    for bucket in split_into_buckets({name: 4 * torch.Size(piece.shape).numel() for name, piece in pieces.items()}):
        counts = [sum(spans[name][rank][1] for name in bucket) for rank in range(ranks.world)]
        flat = torch.zeros(max(counts), device=ranks.device)
        held = torch.cat([pieces[name].local.detach().flatten().to(ranks.device) for name in bucket])
        flat[: held.numel()] = held
        why = "master weights, to export them"
        parts = [flat] if ranks.world == 1 else ranks.gather_bucket(flat, everyone=False, why=why)
        if parts is not None:
            found |= _assemble([part.cpu() for part in parts], {name: pieces[name].shape for name in bucket}, spans)
    return found


def _gather_spans(ranks: ParallelContext, pieces: Mapping[str, LocalRows]) -> dict[str, list[tuple[int, int]]]:
    """Where every rank's piece of each tensor begins in the flattened tensor, and its number of elements."""
    own = [[float(piece.start or 0), float(piece.local.numel())] for piece in pieces.values()]
    gathered = ranks.gather(torch.tensor(own, dtype=torch.float64).flatten(), why="places of master weights")
    places = gathered.view(ranks.world, -1, 2).long().transpose(0, 1).tolist()
    return {name: [(start, count) for start, count in each] for name, each in zip(pieces, places, strict=True)}


def _assemble(
    parts: list[Tensor], shapes: Mapping[str, tuple[int, ...]], spans: Mapping[str, list[tuple[int, int]]]
) -> dict[str, Tensor]:
    """The tensors of a bucket, whose pieces follow each other in every rank's part."""
    found, offsets = {}, [0] * len(parts)
    for name, shape in shapes.items():
        whole = torch.empty(torch.Size(shape).numel())
        for rank, (start, count) in enumerate(spans[name]):
            whole[start : start + count] = parts[rank][offsets[rank] : offsets[rank] + count]
            offsets[rank] += count
        found[name] = whole.view(shape)
    return found
