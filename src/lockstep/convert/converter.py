"""Converts one training of another framework: reads it, applies the rules of its framework and its table, and checks
that the result loads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.base.secrets import redact_text
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.convert.conversion import Conversion, ConversionFacts, OptionOutcome
from lockstep.convert.converted_yaml import render_yaml
from lockstep.convert.errors import NotConvertible
from lockstep.convert.openrlhf.openrlhf_conversion import convert_openrlhf
from lockstep.convert.source_command import SourceCommand, SourceFramework, read_source
from lockstep.convert.trl.trl_conversion import convert_trl
from lockstep.convert.verl.verl_conversion import convert_verl
from lockstep.convert.vlm_r1.vlm_r1_conversion import convert_vlm_r1

_CONVERTERS: Mapping[str, Callable[[Conversion], str]] = {
    "openrlhf": convert_openrlhf,
    "verl": convert_verl,
    "trl": convert_trl,
    "vlm-r1": convert_vlm_r1,
}
"""Each sets the fields that several options decide together, and returns the recipe."""
_PLACEHOLDERS: Mapping[str, Any] = {
    "name": "converted",
    "steps": 1000,
    "model.path": "MODEL",
    "data.path": "DATA",
    "reward.terms": [{"kind": "exact_match"}],
}
"""Values of required fields that the source's own are refused for."""
_ALWAYS_WRITTEN = ("trainer.optimizer.lr", "seed", "steps")


@dataclass(frozen=True, slots=True)
class ConvertedConfig:
    """A config, and what became of each option of its source."""

    recipe: str
    values: Mapping[str, Any]
    text: str
    """YAML."""
    outcomes: tuple[OptionOutcome, ...]
    missing: Mapping[str, str]
    """Fields whose value the source does not contain, with what to do."""
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the run means the same as its source."""
        return not self.missing and all(each.kind in ("converted", "unneeded") for each in self.outcomes)

    def of_kind(self, *kinds: str) -> list[OptionOutcome]:
        """The outcomes of these kinds."""
        return [each for each in self.outcomes if each.kind in kinds]


def convert(framework: SourceFramework, given: Sequence[str], facts: ConversionFacts) -> ConvertedConfig:
    """Converts a file or a command. See `read_source` for `given`, and for most of the errors.

    Raises:
        NotConvertible: also where the training has no counterpart.
    """
    return convert_source(read_source(framework, given), facts)


def convert_source(source: SourceCommand, facts: ConversionFacts) -> ConvertedConfig:
    """Converts a training that was read."""
    conv = Conversion(source, facts)
    recipe = _CONVERTERS[source.framework](conv)
    conv.apply_table()
    config = _loadable(conv, recipe)
    for path in [path for path in conv.fields if _equals_default(conv, config, path)]:
        del conv.fields[path]
    _check(conv, recipe)
    outcomes = tuple(conv.results())
    header = _header(conv, outcomes)
    text = render_yaml(recipe, conv.fields, header, conv.framework)
    return ConvertedConfig(recipe, _nested(conv, recipe), text, outcomes, dict(conv.missing), tuple(conv.notes))


def _nested(conv: Conversion, recipe: str) -> dict[str, Any]:
    values: dict[str, Any] = {"recipe": recipe}
    for path, entry in conv.fields.items():
        section = values
        *parents, last = path.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = entry.value
    return values


def _check(conv: Conversion, recipe: str) -> RunConfig:
    return check_config(_nested(conv, recipe), "the converted config")


def _loadable(conv: Conversion, recipe: str) -> RunConfig:
    """Checks the config; a field that is refused is left out, and its options are listed with the reason."""
    for _ in range(len(conv.fields)):
        try:
            return _check(conv, recipe)
        except ConfigError as error:
            if _fill_in(conv, error):
                continue
            refused = {path: problem for problem in error.problems for path in _refused_fields(conv, problem)}
            if not refused:
                raise NotConvertible(f"the options contradict each other here: {redact_text(str(error))}") from error
            for path, problem in refused.items():
                _leave_out(conv, path, problem)
    raise NotConvertible("no field of the converted config is valid")


def _fill_in(conv: Conversion, error: ConfigError) -> bool:
    """Writes placeholders for required fields that are absent, as what the source has for them was refused."""
    absent = [each.field for each in error.problems if each.message == "is required"]
    filled = [
        path
        for path in _PLACEHOLDERS
        if path not in conv.fields and any(path == each or path.startswith(f"{each}.") for each in absent)
    ]
    for path in filled:
        conv.put(path, _PLACEHOLDERS[path], keep=True)
        conv.need(path, "replace the placeholder: the source's value was refused")
    return bool(filled)


def _refused_fields(conv: Conversion, problem: ConfigProblem) -> list[str]:
    """The fields that a problem is about: by its path, or the first that the message names."""
    path = problem.field
    inside = [each for each in conv.fields if path and (path == each or path.startswith(f"{each}."))]
    below = [each for each in conv.fields if path and each.startswith(f"{path}.")]
    if inside or (below and not problem.message.endswith("required")):
        return inside or below[:1]
    named = [(problem.message.find(each), each) for each in conv.fields if each in problem.message]
    return [min(named)[1]] if named else []


def _leave_out(conv: Conversion, path: str, problem: ConfigProblem) -> None:
    entry = conv.fields.pop(path)
    reason = redact_text(f"{path}: {problem.message}")
    for name in conv.given:
        if conv.shown(name) in entry.names:
            conv.refuse(name, reason)
    if path in _PLACEHOLDERS and entry.value != _PLACEHOLDERS[path]:
        conv.put(path, _PLACEHOLDERS[path], keep=True)
        conv.need(path, f"replace the placeholder: {problem.message}")
    elif entry.default or not entry.names:
        value = redact_text(str(entry.value)[:80])
        conv.need(path, f"{conv.framework}'s default {value} is refused here ({problem.message}): choose a value")


def _equals_default(conv: Conversion, config: RunConfig, path: str) -> bool:
    """Whether a field that comes from a default of the source has the same default here."""
    entry = conv.fields[path]
    if entry.keep or not entry.default or path in _ALWAYS_WRITTEN:
        return False
    *parents, last = path.split(".")
    section: Any = config
    for part in parents:
        section = getattr(section, part)
    declared = type(section).model_fields.get(last) if section is not None else None
    return declared is not None and bool(getattr(section, last) == declared.get_default(call_default_factory=True))


def _header(conv: Conversion, outcomes: Sequence[OptionOutcome]) -> list[str]:
    program = conv.source.program.rpartition(".")[2]
    lines = [f"Converted from {conv.framework} ({program}) by `lockstep convert`."]
    open_ = [f"  {each.name}: {each.text}" for each in outcomes if each.kind in ("unsupported", "unknown")]
    open_ += [f"  {field}: {text}" for field, text in conv.missing.items()]
    return [redact_text(each) for each in (*lines, *(["Not converted:", *open_] if open_ else []))]
