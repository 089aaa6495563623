"""Chooses the hypotheses that explain a snapshot: the cheapest set that covers everything that is anomalous.

Each hypothesis stands for the anomaly that its proposer saw. It covers that anomaly; a proven cause also covers those
that it may have caused (the table of effects in `live_weights.yaml`), and their effects in turn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.inference import cheapest_cover, surprise
from lockstep.watch.diagnosis.live_weights import live_weights
from lockstep.watch.diagnosis.verdict import VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray, mask_of

SIMULTANEOUS_S = 0.1
"""Deaths at most this far apart have no reliable order, because clocks and the detection of exits are imprecise."""
ORDER_S = 1.0
"""Other events this far apart have no reliable order."""
AFTERMATH_S = 5.0
"""A process killed more than this long after another process died was killed by its launcher because of that death."""
KILLED = (-9, 137)
"""Exit codes of a kill."""
TEARDOWN_S = 10.0
"""A process may need this long to exit after an exception, while peers whose connections to it break exit at once."""


def choose_explanation(context: DiagnosisContext, found: list[Hypothesis]) -> list[Hypothesis]:
    """The cheapest set of hypotheses that covers the anomalies of all; each with the deaths that it explains."""
    if len(found) < 2 or not any(_is_cause(each) for each in found):
        return found
    covers = _coverage(context, found)
    chosen = cheapest_cover(covers, [surprise(each.log_odds) for each in found], [math.inf] * len(found))
    return [
        _with_effects(found[at], [each for i, each in enumerate(found) if i != at and covers[at, i]]) for at in chosen
    ]


def _is_cause(hypothesis: Hypothesis) -> bool:
    """Whether a hypothesis is proven enough to explain others."""
    proven = hypothesis.proven_by_structure or bool(hypothesis.answers.get("others_gave_up"))
    return proven and hypothesis.level is VerdictLevel.CONFIRMED


def _coverage(context: DiagnosisContext, found: Sequence[Hypothesis]) -> BoolArray:
    """`[hypotheses, hypotheses]`: whether the first covers the anomaly of the second."""
    kinds = [_kind(context, each) for each in found]
    footprints = [_footprint(context, each) for each in found]
    covers = np.eye(len(found), dtype=np.bool_)
    for c, cause in enumerate(found):
        for e, effect in enumerate(found if _is_cause(cause) else ()):
            rules = live_weights().effects.get((kinds[c], kinds[e]), ()) if c != e else ()
            if any(all(CONDITIONS[name](context, cause, effect) for name in rule) for rule in rules):
                covers[c, e] |= bool((footprints[c] & footprints[e]).any())
    while (reached := covers.astype(np.float32) @ covers > 0).sum() > covers.sum():
        covers = reached
    return covers


def _kind(context: DiagnosisContext, hypothesis: Hypothesis) -> str:
    """The kind of cause and effect, as the table of effects names it."""
    own, proven = set(hypothesis.culprits), hypothesis.proven_by_structure
    if any(context.liveness(p) is Liveness.DEAD for p in own) and hypothesis.kind is VerdictKind.DEAD:
        if hypothesis.log_odds >= live_weights().self_caused:
            return "kill" if all(context.evidence.processes.exit_code[p] in KILLED for p in own) else "crash"
        return "echo" if hypothesis.answers.get("secondary") else "death"
    if hypothesis.kind is VerdictKind.DEAD or (hypothesis.kind is VerdictKind.STARVED and proven):
        return "exit"
    if hypothesis.kind is VerdictKind.ABSENT:
        return "stopped" if proven else "late" if hypothesis.answers.get("others_gave_up") else "absent"
    return "doubted_device" if hypothesis.kind is VerdictKind.DEVICE and not proven else str(hypothesis.kind)


def _footprint(context: DiagnosisContext, hypothesis: Hypothesis) -> BoolArray:
    """`[processes + communicators]`: true for those that a hypothesis involves; hypotheses of one incident overlap."""
    members, graph = context.evidence.communicators, context.graph
    involved = mask_of(len(context.evidence.processes.info), [*hypothesis.culprits, *hypothesis.others])
    communicators = np.zeros(len(members.info), dtype=np.bool_)
    if hypothesis.node is not None:
        involved[graph.wait_process[graph.wait_node == hypothesis.node]] = True
        if graph.communicator[hypothesis.node] >= 0:
            communicators[graph.communicator[hypothesis.node]] = True
    if hypothesis.collective is not None:
        communicators[hypothesis.collective[0]] = True
    involved[[whole for part, whole in context.wholes.items() if involved[part]]] = True
    communicators[context.pending.communicator[involved[members.process]]] = True
    return np.concatenate([involved, communicators])


def _with_effects(cause: Hypothesis, effects: Sequence[Hypothesis]) -> Hypothesis:
    deaths = [each for each in effects if each.kind is VerdictKind.DEAD and each.kind is cause.kind]
    facts = [
        replace(each.facts[0], text=f"{each.facts[0].text}, later or as an effect") for each in deaths if each.facts
    ]
    return replace(cause, facts=(*cause.facts, *facts[:4])[:16])


def _active_now(context: DiagnosisContext, cause: Hypothesis, effect: Hypothesis) -> bool:
    """Whether the culprits of the effect are active, or may be."""
    active = (measure_inactivity(context, p).is_active(context.thresholds.notice_s) for p in effect.culprits)
    return math.isnan(_last_activity(context, effect)) or any(active)


def _active_until_then(context: DiagnosisContext, cause: Hypothesis, effect: Hypothesis) -> bool:
    """Whether the culprits of the effect were active until the cause, or may have been."""
    if not math.isfinite(cause.since):
        return _active_now(context, cause, effect)
    return not _last_activity(context, effect) < cause.since - ORDER_S


def _last_activity(context: DiagnosisContext, hypothesis: Hypothesis) -> float:
    """When the culprits were last active; NaN if that is unknown of one, or there are none."""
    return float(np.max([context.last_activity(p) for p in hypothesis.culprits] or [math.nan]))


def _same_process(context: DiagnosisContext, cause: Hypothesis, effect: Hypothesis) -> bool:
    """Whether the effect is about processes of the cause, or about processes whose parts these are."""
    own = {*cause.culprits, *(context.whole(p) for p in cause.culprits)}
    return own >= {*effect.culprits}


CONDITIONS: dict[str, Callable[[DiagnosisContext, Hypothesis, Hypothesis], bool]] = {
    "less_likely": lambda context, cause, effect: effect.log_odds < cause.log_odds,
    "shares_culprit": lambda context, cause, effect: not {*cause.culprits}.isdisjoint(effect.culprits),
    "same_process": _same_process,
    "active_now": _active_now,
    "active_until_then": _active_until_then,
    "not_earlier": lambda context, cause, effect: not effect.since < cause.since - ORDER_S,
    "within_teardown": lambda context, cause, effect: not effect.since < cause.since - TEARDOWN_S,
    "simultaneous": lambda context, cause, effect: not abs(effect.since - cause.since) > SIMULTANEOUS_S,
    "later": lambda context, cause, effect: effect.since > cause.since + SIMULTANEOUS_S,
    "in_aftermath": lambda context, cause, effect: np.nan_to_num(effect.since, nan=np.inf) > cause.since + AFTERMATH_S,
}
"""The conditions of the table of effects. An unknown time may be any, except that of a kill, which counts as late."""
