"""Reads `live_weights.yaml`: what the inference knows about live beacons and dumps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lockstep.watch.diagnosis.inference import Calibration, FactorWeight, add_up
from lockstep.watch.diagnosis.verdict import Fact

Answers = Mapping[str, bool | None]
"""The answers to factors by name; None: not observed."""


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """The content of the file."""

    factors: Mapping[str, FactorWeight]
    about: Mapping[str, Mapping[str, Any]]
    """The texts and ceilings of factors."""
    ceilings: Mapping[str, dict[str, float]]
    self_caused: float
    effects: Mapping[tuple[str, str], Sequence[Sequence[str]]]
    """By kind of cause and kind of effect: lists of conditions, of which all of one list must hold."""

    def log_odds(self, answers: Answers) -> float:
        return add_up(0.0, answers, self.factors)

    def confidence(self, answers: Answers, source: str, proof: str) -> float:
        """The confidence of a hypothesis, in whole percents. `source` is that of the evidence, `proof` one of
        `structure`, `inactivity` and `notice`."""
        ceilings = [self.about[name].get("ceiling", 1.0) for name, answer in answers.items() if answer]
        ceiling = min([(self.ceilings["any"] | self.ceilings.get(source, {}))[proof], *ceilings])
        return round(Calibration(ceiling=ceiling).confidence(self.log_odds(answers)), 2)

    def facts(self, answers: Answers) -> tuple[Fact, ...]:
        """The answers as evidence."""
        given = ((name, "says" if answer else "otherwise") for name, answer in answers.items() if answer is not None)
        return tuple(Fact(self.about[name][key], "diagnosis") for name, key in given if key in self.about[name])


@cache
def live_weights() -> LiveWeights:
    """The content of the file, which is read once."""
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8")
    data: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    effects: dict[tuple[str, str], list[Sequence[str]]] = {}
    for rule in data["effects"]:
        for pair in product(rule["cause"], rule["effect"]):
            effects.setdefault(pair, []).append(rule.get("if", ()))
    about = data["factors"]
    weights = {name: FactorWeight(each.get("if_yes", 0.0), each.get("if_no", 0.0)) for name, each in about.items()}
    return LiveWeights(weights, about, data["ceilings"], data["self_caused"], effects)
