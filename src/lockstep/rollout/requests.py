"""What every engine refuses of a request, and what it answers for one that never ran."""

from collections.abc import Container

import numpy as np

from lockstep.data.samples import Completion
from lockstep.rollout.errors import BadRequest
from lockstep.rollout.protocol import Request


def check_request(request: Request, prompt: np.ndarray, known: Container[str], context: int, vocabulary: int) -> None:
    """Raises BadRequest for one that cannot be served.

    Args:
        prompt: that of its group.
        known: ids that are under way.
        context: tokens of the longest sequence.
        vocabulary: how many tokens there are.
    """
    length = len(request.prompt)
    if request.id in known:
        raise BadRequest(request.id, "is already here")
    if length == 0:
        raise BadRequest(request.id, "has an empty prompt")
    if request.max_tokens < 1:
        raise BadRequest(request.id, f"wants {request.max_tokens} tokens, expected at least 1")
    if length + request.max_tokens > context:
        raise BadRequest(
            request.id,
            f"needs {length} prompt tokens + max_tokens {request.max_tokens} = {length + request.max_tokens}, "
            f"the context holds {context}",
        )
    if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= vocabulary:
        raise BadRequest(request.id, f"has a prompt token outside of the vocabulary of {vocabulary}")
    if prompt is not request.prompt and not np.array_equal(prompt, request.prompt):
        raise BadRequest(request.id, f"has another prompt than the rest of group {request.group!r}")


def nothing(request: Request) -> Completion:
    """What a request that never ran has."""
    empty = np.zeros(0, np.int32)
    return Completion(request.id, empty, np.zeros(0, np.float32), empty.copy(), "abort", "")
