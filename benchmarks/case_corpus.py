"""Jobs with known causes, and whether a verdict about one of them is right.

A corpus is a folder with `truth.json` and `jobs/ID/`, each the output of a job as its user finds it. `truth.json` gives
for each id the `class`, further classes that are right (`also_ok`), whether the logs show the cause (`sufficiency`:
root, hint or none), the `culprit` and other right sets (`culprit_alt`), and the `framework`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.watch.diagnosis.verdict import Culprit, Verdict

OWN_CASES = Path(__file__).parent / "cases"
"""The corpora of this repository."""
SET_ASIDE = (
    "threads_communication", "threads_failures",
    "set_aside", "second_set_aside", "third_set_aside", "fourth_set_aside", "fifth_set_aside", "sixth_set_aside",
    "seventh_set_aside", "eighth_set_aside",
)  # fmt: skip
"""Those that are scored only when they are named."""
SURE = 0.8
"""A wrong answer of at least this confidence is a confident error."""
_FAMILIES = (
    ("Ray", r"ray|verl|skyrl|openrlhf|nemo"),
    ("vLLM", r"vllm|sglang"),
    ("DeepSpeed", r"deepspeed"),
    ("trainers", r"transformers|trl|accelerate|lightning|llama-factory|swift"),
    ("Megatron", r"megatron|torchtitan"),
    ("gloo loops", r"gloo"),
    ("PyTorch", r"torch"),
)
"""Families of frameworks with a pattern for the `framework` of a case; the first match counts."""
_UNIT = re.compile(r"^(?:host|node|hostname|ip|interface|nic|if|device|actor)\s*[:= ]\s*")


@dataclass(frozen=True, slots=True)
class KnownCase:
    """A job, and the answers that count as right."""

    name: str
    folder: Path
    classes: frozenset[str]
    sufficiency: str
    culprits: tuple[tuple[Any, ...], ...]
    """The sets of culprits that are right; none: not scored."""
    framework: str
    healthy: bool
    """Whether nothing is wrong with the job."""

    @property
    def family(self) -> str:
        """The family of its framework."""
        return next((name for name, words in _FAMILIES if re.search(words, self.framework.lower())), "others")

    def class_right(self, verdict: Verdict) -> bool:
        """Whether the class is right. Where the logs decide nothing, only "unknown" or an unsure answer is."""
        cls, right = verdict.cause or "unknown", verdict.cause in self.classes
        if self.sufficiency == "none":
            return cls == "unknown" or (right and verdict.confidence < SURE)
        return right or (self.sufficiency == "hint" and cls == "unknown")

    def culprits_right(self, verdict: Verdict) -> bool | None:
        """Whether the verdict names one of the right sets as a whole and nobody else; None if that is not scored."""
        if not self.culprits:
            return None
        said = [_names(each) for each in verdict.culprits]
        return any(_same(said, [_names(each) for each in truth]) for truth in self.culprits)


def read_corpus(folder: Path) -> list[KnownCase]:
    """Reads a corpus.

    Raises:
        ValueError: `truth.json` is not there, or names a job that is not.
    """
    try:
        truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} is no corpus of cases: {error}") from error
    absent = [name for name in truth if not (folder / "jobs" / name).is_dir()]
    if absent:
        raise ValueError(f"{folder / 'truth.json'} names {absent[0]!r}, but there is no folder jobs/{absent[0]}")
    return [_case(folder / "jobs" / name, truth[name]) for name in sorted(truth)]


def _case(folder: Path, about: dict[str, Any]) -> KnownCase:
    sets = [about.get("culprit"), *(about.get("culprit_alt") or [])] if about.get("culprit") else []
    return KnownCase(
        folder.name,
        folder,
        frozenset((about["class"], *(about.get("also_ok") or ()))),
        about.get("sufficiency") or "root",
        tuple(tuple(each) if isinstance(each, list) else (each,) for each in sets),
        about.get("framework") or "",
        about["class"] == "benign",
    )


def _same(said: Sequence[set[str]], truth: Sequence[set[str]]) -> bool:
    each_right = all(any(one & other for other in truth) for one in said)
    return bool(said) and each_right and all(any(one & other for other in said) for one in truth)


def _names(culprit: Culprit | str | int) -> set[str]:
    """Returns the spellings of a culprit, of which one suffices: `rank:3`, a host without its domain, a device."""
    if isinstance(culprit, Culprit):
        given = (culprit.rank, culprit.host, culprit.name, culprit.pid)
        return set().union(*(_names(str(each) if each is culprit.pid else each) for each in given if each is not None))
    if isinstance(culprit, int):
        return {f"rank:{culprit}"}
    text = culprit.strip().lower()
    rank = re.fullmatch(r"\[?(?:global[ _-]*)?(?:ranks?|r)?[ _:=#-]*(\d+)\]?", text)
    if rank:
        return {f"rank:{int(rank[1])}"}
    text = _UNIT.sub("", text).strip("[]<>()'\" ").removeprefix("=")
    text = text.split(".")[0] if re.match(r"^[a-z][\w-]*\.[a-z]", text) else text
    return {re.sub(r"[ _]+", " ", re.sub(r"\.(?:log|txt|out|err)$", "", text))} if text else set()


def own_corpora() -> Iterable[Path]:
    """Returns the folders of this repository's corpora but those set aside."""
    return sorted(each.parent for each in OWN_CASES.glob("**/truth.json") if each.parent.name not in SET_ASIDE)
