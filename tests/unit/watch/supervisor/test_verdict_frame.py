"""What the supervisor publishes about a verdict."""

import pytest

from lockstep.watch.diagnosis.verdict import Culprit, Fact, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.subscribers import verdict_frame
from lockstep.watch.supervisor.supervisor import may_abort
from lockstep.watch.supervisor.verdict_tracker import VerdictChange, VerdictUpdate


def test_secrets_that_a_verdict_quotes_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "wolf-and-moon-17")
    error = "judge raised OSError: https://anna:hunter22@judge refused wolf-and-moon-17"
    verdict = Verdict(
        VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy"),), confidence=0.9, explanation=error,
        evidence=(Fact(error),),
    )  # fmt: skip
    frame = verdict_frame(VerdictUpdate(1, VerdictChange.NEW, verdict, 0.0, 1.0), None, f"{error} freed", ("t0k3n",))
    assert frame["headline"] == "judge raised OSError: https://[hidden]@judge refused [hidden]"
    assert frame["who"] == ["policy-1"] and frame["level"] == "confirmed"
    for secret in ("wolf-and-moon-17", "hunter22"):
        assert secret not in str(frame)


@pytest.mark.parametrize(
    ("on_stall", "confidence", "expected"),
    [("free", 0.78, True), ("free", 0.75, True), ("free", 0.7, False), ("report", 0.99, False), ("dump", 0.99, False)],
)
def test_collectives_are_aborted_only_by_a_verdict_that_is_certain_enough(
    on_stall: str, confidence: float, expected: bool
) -> None:
    """A rank that may compute is confirmed with 0.7."""
    verdict = Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy"),), confidence=confidence)
    assert may_abort(on_stall, verdict) is expected
