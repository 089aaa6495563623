"""Decides from the evaluations of a run whether it has stopped improving."""

from collections.abc import Mapping

from lockstep.base.text import count_noun
from lockstep.config.run_config import EarlyStoppingConfig

STOP_EVENT = "early_stop"
"""The ledger event of a run that ended early, with the reason."""


class MetricNotMeasured(ValueError):
    """The metric of early stopping is not among those of the evaluations."""


def stop_reason(config: EarlyStoppingConfig | None, history: Mapping[int, Mapping[str, float]], version: int) -> str:
    """Returns why the run ends after `version` steps; empty if it does not.

    Only evaluations up to `version` count, so that a resumed run decides as the first attempt did.

    Args:
        history: the metrics of evaluations, by number of steps done.

    Raises:
        MetricNotMeasured: the evaluation before the first step did not measure the metric.
    """
    if config is None or version not in history:
        return ""
    if version == 0 and config.metric not in history[0]:
        measured = ", ".join(sorted(history[0]))
        raise MetricNotMeasured(f"early_stopping.metric {config.metric} is not measured; there are {measured}")
    sign = -1.0 if config.lower_is_better else 1.0
    values = [(each, history[each][config.metric]) for each in sorted(history) if each <= version
              and config.metric in history[each]]  # fmt: skip
    best_version, best, without = 0, float("nan"), 0
    for each, value in values:
        if best != best or sign * (value - best) > config.min_delta:
            best_version, best, without = each, value, 0
        else:
            without += 1
    if not values or values[-1][0] != version or without < config.patience:
        return ""
    return (
        f"{config.metric} has not improved in {count_noun(without, 'evaluation')} "
        f"(best {best:.6g} after step {best_version}, now {values[-1][1]:.6g})"
    )
