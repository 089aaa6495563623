"""What an engine refuses, as errors with fields."""

from collections.abc import Sequence


class BadRequest(ValueError):
    """A request that cannot be served: `request` is its id, `problem` says why."""

    def __init__(self, request: str, problem: str) -> None:
        super().__init__(f"request {request!r} {problem}")
        self.request, self.problem = request, problem

    def __reduce__(self) -> tuple[type["BadRequest"], tuple[str, str]]:
        return type(self), (self.request, self.problem)


class BadLogits(ArithmeticError):
    """A distribution that cannot be drawn from: NaN, infinite, or nothing left in it."""

    def __init__(self, request: str, index: int, value: float, version: int) -> None:
        super().__init__(
            f"request {request!r}: the largest logit of token {index} is {value} (weights version {version}); "
            f"the weights have diverged, or the precision is too low for this model"
        )
        self.request, self.index, self.value, self.version = request, index, value, version

    def __reduce__(self) -> tuple[type["BadLogits"], tuple[str, int, float, int]]:
        return type(self), (self.request, self.index, self.value, self.version)


class WeightsMismatch(ValueError):
    """Published weights that are not the engine's: names it does not have, names it misses."""

    def __init__(self, unknown: Sequence[str], missing: Sequence[str]) -> None:
        parts = [
            f"{len(names)} {what} ({', '.join(list(names)[:3])}{', ...' if len(names) > 3 else ''})"
            for names, what in ((unknown, "not in the model"), (missing, "missing from the store"))
            if names
        ]
        super().__init__(f"the published weights do not fit the engine's model: {'; '.join(parts)}")
        self.unknown, self.missing = tuple(unknown), tuple(missing)

    def __reduce__(self) -> tuple[type["WeightsMismatch"], tuple[tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.unknown, self.missing)


class InterruptedUpdate(RuntimeError):
    """Weights of `version` stopped coming, as `problem` says. The engine serves nobody until it has some whole."""

    def __init__(self, version: int, problem: str) -> None:
        super().__init__(f"weights version {version} did not come whole: {problem}")
        self.version, self.problem = version, problem

    def __reduce__(self) -> tuple[type["InterruptedUpdate"], tuple[int, str]]:
        return type(self), (self.version, self.problem)


class TornEngine(RuntimeError):
    """An engine that failed in the middle of taking `version`: some of its weights are new and others are not."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the engine failed in the middle of taking weights version {version}: it must be replaced")
        self.version = version

    def __reduce__(self) -> tuple[type["TornEngine"], tuple[int]]:
        return type(self), (self.version,)


class NoWeights(RuntimeError):
    """An engine that has forgotten its weights (`sleep` at level 2) and was given no others."""

    def __init__(self) -> None:
        super().__init__("the engine slept at level 2 and has no weights: load a version before requests")
