"""One table of completion lengths for all sides: each ends its rows accordingly, in the cheapest way it has.

Lockstep's requests each carry a `max_tokens`, and do not end at an end-of-sequence token. TRL has one
`max_completion_length` for all and finds a row's end by its end-of-sequence token, so a logits processor forbids the
token before the row's length and forces it there: one or two small assignments per token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from lockstep.data.sample_order import parse_uid
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import Request, RequestGroup


def force_requests(engines: RolloutClient, table: np.ndarray) -> None:
    """Set `max_tokens` of every request from the table `[prompts, group]`."""
    submit = engines.submit

    def forced(groups: Sequence[RequestGroup], **kwargs: Any) -> None:
        requests = [request for group in groups for request in group.requests]
        for each in requests:
            each.max_tokens = _length(each, table)
        submit(RequestGroup.all_of(requests), **kwargs)

    engines.submit = forced  # type: ignore[method-assign]


def _length(request: Request, table: np.ndarray) -> int:
    _, name, completion = request.id.split("/")
    _, row = parse_uid(name)
    return int(table[row, int(completion)])


class ForcedLengths(LogitsProcessor):
    """Forbids the end-of-sequence token before a row's length, and forces it there."""

    def __init__(self, lengths: np.ndarray, eos: int, prompt: int) -> None:
        self._ends = {int(length) - 1: torch.from_numpy(np.flatnonzero(lengths == length)) for length in set(lengths)}
        self._eos, self._prompt = eos, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens]`, `[rows, vocabulary]`."""
        scores[:, self._eos] = -torch.inf
        rows = self._ends.get(input_ids.shape[1] - self._prompt)
        if rows is not None:
            scores[rows] = -torch.inf
            scores[rows, self._eos] = 0.0
        return scores


def force_generate(model: Any, table: np.ndarray, eos: int) -> None:
    """Make `model.generate` give the i-th row of all its calls the i-th length of the table."""
    generate: Callable[..., Any] = model.generate
    done = 0

    def forced(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        rows, prompt = kwargs["input_ids"].shape
        mine = ForcedLengths(table[done : done + rows], eos, prompt)
        done += rows
        return generate(*args, logits_processor=LogitsProcessorList([mine]), **kwargs)

    model.generate = forced
