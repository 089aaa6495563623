"""A lower bound for a training step: the matrix products of its tokens, and nothing else.

Like the floor of generation (`benchmarks.generation`): every prompt once, then each completion's own tokens; one
product forward and two backward for every projection and the head, and for attention the scores and values forward and
their four products backward, over all pairs of positions that may attend to each other. Where a reference is evaluated,
the products forward are computed once more.
"""

import time
from statistics import median
from typing import Any

import torch

from benchmarks.generation import projections
from benchmarks.workloads import Work, document_lengths, lengths


def segments(work: Work) -> list[tuple[int, list[int]]]:
    """For one step, (tokens of the prompt, tokens of each continuation) of every prompt."""
    if work.kind == "sft":
        return [(int(size) + 1, []) for size in document_lengths(work)]
    return [(work.prompt_tokens, row.tolist()) for row in lengths(work)]


class TrainingFloor:
    """The matrix products of one step, on one thread."""

    def __init__(self, lm: Any, work: Work) -> None:
        config = lm.config
        self._layers = [
            [torch.cat([module.weight.detach() for module in modules]) for modules in projections(layer)]
            for layer in lm.model.layers
        ]
        self._head = lm.lm_head.weight.detach()
        self._heads, self._dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self._trees = segments(work)
        self.tokens = sum(root + sum(own) for root, own in self._trees)
        self.targets = sum(sum(own) if own else root - 1 for root, own in self._trees)
        self._has_reference = work.kind == "preference"

    def run(self) -> None:
        if self._has_reference:
            self._products(backward=False)
        self._products(backward=True)

    def _products(self, backward: bool) -> None:
        for layer in self._layers:
            for weight in layer:
                self._linear(weight, self.tokens, backward)
            for root, own in self._trees:
                self._attention(root, root, backward)
                if own:
                    self._attention(sum(own), root, backward)
                for size in own:
                    self._attention(size, size, backward)
        self._linear(self._head, self.targets, backward)

    def seconds(self, repeats: int) -> float:
        """Median CPU seconds, after one run to warm up."""
        taken = []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                began = time.process_time()
                self.run()
                taken.append(time.process_time() - began)
        return median(taken[1:])

    @staticmethod
    def _linear(weight: torch.Tensor, rows: int, backward: bool) -> None:
        for start in range(0, rows, 4096):  # in packed rows, so that memory is as in a real step
            count = min(4096, rows - start)
            x, dy = torch.zeros(count, weight.shape[1]), torch.zeros(count, weight.shape[0])
            torch.mm(x, weight.T)
            if backward:
                torch.mm(dy, weight)
                torch.mm(dy.T, x)

    def _attention(self, queries: int, keys: int, backward: bool) -> None:
        q, k = torch.zeros(self._heads, queries, self._dim), torch.zeros(self._heads, keys, self._dim)
        p = torch.bmm(q, k.transpose(1, 2))
        torch.bmm(p, k)
        if not backward:
            return
        torch.bmm(p.transpose(1, 2), q)  # gradient of the values
        dp = torch.bmm(q, k.transpose(1, 2))
        torch.bmm(dp, k)  # gradient of the queries
        torch.bmm(dp.transpose(1, 2), q)  # gradient of the keys


def training_floor(lm: Any, work: Work, repeats: int = 3) -> float:
    """CPU seconds of a step's matrix products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return TrainingFloor(lm, work).seconds(repeats)
    finally:
        torch.set_num_threads(threads)
