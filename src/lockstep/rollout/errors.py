"""Errors of rollout engines."""

from collections.abc import Sequence

from lockstep.base.errors import PicklableError


class BadRequest(PicklableError, ValueError):
    """A request cannot be served. `request` is its id, `problem` says why."""

    def __init__(self, request: str, problem: str) -> None:
        super().__init__(f"request {request!r} {problem}")
        self.request, self.problem = request, problem


class BadLogits(PicklableError, ArithmeticError):
    """A distribution cannot be sampled, because it is NaN, infinite or empty."""

    def __init__(self, request: str, index: int, value: float, version: int) -> None:
        super().__init__(
            f"request {request!r}: the largest logit of token {index} is {value} (weights version {version}); "
            f"the weights have diverged, or the precision is too low for this model"
        )
        self.request, self.index, self.value, self.version = request, index, value, version


class WeightsMismatch(PicklableError, ValueError):
    """The published weights do not fit the engine's model. `unknown` and `missing` are names of tensors."""

    error_code = "weights_mismatch"

    def __init__(self, unknown: Sequence[str], missing: Sequence[str]) -> None:
        parts = [
            f"{len(names)} {what} ({', '.join(list(names)[:3])}{', ...' if len(names) > 3 else ''})"
            for names, what in ((unknown, "not in the model"), (missing, "missing from the store"))
            if names
        ]
        super().__init__(f"the published weights do not fit the engine's model: {'; '.join(parts)}")
        self.unknown, self.missing = tuple(unknown), tuple(missing)


class InterruptedUpdate(PicklableError, RuntimeError):
    """The weights of `version` did not arrive completely. The engine serves no request until it has loaded a complete
    version."""

    error_code = "interrupted_update"

    def __init__(self, version: int, problem: str) -> None:
        super().__init__(f"weights version {version} did not arrive completely: {problem}")
        self.version, self.problem = version, problem


class TornEngine(PicklableError, RuntimeError):
    """The engine failed while loading `version`, so that some of its weights may be new and others old."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the engine failed while loading weights version {version} and must be replaced")
        self.version = version


class NoWeights(PicklableError, RuntimeError):
    """The engine dropped its weights (`sleep` at level 2) and has not loaded new ones."""

    def __init__(self) -> None:
        super().__init__("the engine slept at level 2 and has no weights: load a version before submitting requests")
