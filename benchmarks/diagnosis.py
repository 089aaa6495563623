"""How well `lockstep explain` judges jobs with known causes: `python -m benchmarks.diagnosis [CORPUS ...]`.

    python -m benchmarks.diagnosis                       the corpora of this repository
    python -m benchmarks.diagnosis ../shared/cases       another one: a folder with truth.json and jobs/
    python -m benchmarks.diagnosis --no-ablation         without the effect of each rule: seconds
    python -m benchmarks.diagnosis --wrong               also the wrong answers
    python -m benchmarks.diagnosis --by-framework        also right classes by framework, with intervals

Every job is read once. A rule is then left out by dropping its matches, which gives what the job would have been judged
without it. Printed are the right classes and culprits

- plain: with all signatures, also those that were written for the case itself;
- without each case's own signatures: those that match in no other case of the given corpora;
- without each family's: those that match only in cases of one family of frameworks, the case's;

then how often answers of each confidence are right, with each case's own signatures left out, and the effect of each
signature group (a class and a role, or a fact), and of each function of `doctor.judge`, replaced by one that finds
nothing (`no`, `none`, what it was given) or that always agrees (`yes`).
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.case_corpus import SURE, KnownCase, own_corpora, read_corpus
from benchmarks.judge_ablation import Removal, called_functions, removals
from lockstep.doctor.judge.log_diagnosis import JobRecord, judge_job, read_job
from lockstep.doctor.knowledge.knowledge_base import FailureRule, KnowledgeBase, load_knowledge
from lockstep.doctor.logs.line_origin import PLACING_FACTS
from lockstep.watch.diagnosis.verdict import Verdict

BINS = 10
RESAMPLES, SEED = 2000, 20
"""Of the bootstrap interval of the calibration error."""


@dataclass(frozen=True, slots=True)
class ReadCase:
    """A case with the record of its job and the ids of the rules that match in it."""

    case: KnownCase
    job: JobRecord
    fired: frozenset[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict about a case, scored."""

    case: KnownCase
    verdict: Verdict
    class_right: bool
    culprits_right: bool | None

    @property
    def said(self) -> tuple[str, frozenset[object]]:
        """Class and culprits."""
        return self.verdict.cause or "unknown", frozenset(
            (each.rank, each.host, each.name) for each in self.verdict.culprits
        )


def read_cases(folders: Iterable[Path], rules: KnowledgeBase) -> list[ReadCase]:
    """Reads the jobs of some corpora."""
    found = []
    for case in (each for folder in folders for each in read_corpus(folder)):
        job = read_job([str(case.folder)], rules)
        found.append(ReadCase(case, job, frozenset(match.rule.id for log in job.logs for match in log.matches)))
    return found


def without(read: ReadCase, rules: KnowledgeBase, left_out: frozenset[str]) -> tuple[JobRecord, KnowledgeBase]:
    """Returns the record of a case's job without the matches of the rules `left_out`, and the other rules."""
    if not left_out & read.fired:
        return read.job, rules
    if any(each.rule.id in left_out and each.rule.signature.fact in PLACING_FACTS
           for log in read.job.logs for each in log.matches):  # fmt: skip
        fewer = rules.without(left_out)  # without them, lines have other origins
        return read_job([str(read.case.folder)], fewer), fewer
    logs = [replace(log, matches=[each for each in log.matches if each.rule.id not in left_out])
            for log in read.job.logs]  # fmt: skip
    return replace(read.job, logs=logs), rules.without(left_out)


def answer(read: ReadCase, rules: KnowledgeBase, left_out: frozenset[str] = frozenset()) -> Answer:
    """Judges a case, without the rules `left_out`."""
    verdict = judge_job(*without(read, rules, left_out)).verdict
    return Answer(read.case, verdict, read.case.class_right(verdict), read.case.culprits_right(verdict))


def own_rules(cases: Sequence[ReadCase], group: Callable[[ReadCase], object]) -> Mapping[object, frozenset[str]]:
    """Returns for each group of cases the rules that match in no case outside of it."""
    groups_of_rule: dict[str, set[object]] = defaultdict(set)
    for read in cases:
        for rule in read.fired:
            groups_of_rule[rule].add(group(read))
    found: dict[object, frozenset[str]] = {}
    for name in {group(read) for read in cases}:
        found[name] = frozenset(rule for rule, groups in groups_of_rule.items() if groups == {name})
    return found


def left_out_answers(
    cases: Sequence[ReadCase], rules: KnowledgeBase, group: Callable[[ReadCase], object]
) -> list[Answer]:
    """Judges each case without the rules that match only in its group."""
    own = own_rules(cases, group)
    return [answer(read, rules, own[group(read)]) for read in cases]


def by_case(read: ReadCase) -> object:
    return read.case.folder


def by_family(read: ReadCase) -> object:
    return read.case.family


def share(answers: Sequence[Answer]) -> tuple[int, int, int, int]:
    """Returns right classes, cases, right culprits, and cases with culprits."""
    culprits = [each.culprits_right for each in answers if each.culprits_right is not None]
    return sum(each.class_right for each in answers), len(answers), sum(culprits), len(culprits)


def score_line(name: str, answers: Sequence[Answer]) -> str:
    right, cases, culprits, scored = share(answers)
    sure = sum(not each.class_right and each.verdict.confidence >= SURE for each in answers)
    healthy = [each for each in answers if each.case.healthy]
    alarms = sum(not each.class_right for each in healthy)
    line = f"{name:26}{right:4} of {cases:<4}{_percent(right, cases)}   {culprits:4} of {scored:<4}"
    return f"{line}{_percent(culprits, scored)}   {sure:10}   {alarms:4} of {len(healthy)}"


def framework_lines(answers: Sequence[Answer]) -> list[str]:
    """Returns for each framework, and for all, the right classes and the 95% interval of their share."""
    frameworks = Counter(each.case.framework for each in answers)
    chosen = {name: [each for each in answers if each.case.framework == name] for name, _ in frameworks.most_common()}
    lines = []
    for name, own in {**chosen, "all": answers}.items():
        right, cases, *_ = share(own)
        low, high = wilson_interval(right, cases)
        lines.append(f"{name:26}{right:4} of {cases:<4}{_percent(right, cases)}   {100 * low:.0f} to {100 * high:.0f}%")
    return lines


def wilson_interval(right: int, cases: int) -> tuple[float, float]:
    """Returns the 95% interval of a share: Wilson, "Probable inference", JASA 22 (1927)."""
    z = 1.959964
    middle = (right + z * z / 2) / (cases + z * z)
    half = z * (right * (cases - right) / cases + z * z / 4) ** 0.5 / (cases + z * z)
    return middle - half, middle + half


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:5.1f}%" if whole else "     -"


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Returns the expected calibration error: the mean distance between confidence and share of right answers over
    bins of equal width, weighted by their answers.

    Args:
        confidence, right: One value per answer `[answers]`.
    """
    at = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(at, confidence - right, BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def calibration_lines(answers: Sequence[Answer]) -> list[str]:
    """Returns the reliability table and the calibration error with its 95% interval."""
    confidence = np.array([each.verdict.confidence for each in answers])
    right = np.array([each.class_right for each in answers], dtype=float)
    at = np.minimum((confidence * BINS).astype(int), BINS - 1)
    lines = ["confidence      answers   mean   right"]
    for one in range(BINS):
        own = at == one
        if own.any():
            means = f"{confidence[own].mean():.2f}   {right[own].mean():.2f}"
            lines.append(f"{one / BINS:.1f} to {(one + 1) / BINS:.1f}   {own.sum():10}   {means}")
    drawn = np.random.default_rng(SEED).integers(0, len(answers), (RESAMPLES, len(answers)))
    errors = [calibration_error(confidence[each], right[each]) for each in drawn]
    low, high = np.quantile(errors, (0.025, 0.975))
    error = calibration_error(confidence, right)
    return [*lines, f"expected calibration error {error:.3f} (95% of resamples: {low:.3f} to {high:.3f})"]


def rule_groups(cases: Sequence[ReadCase], rules: KnowledgeBase) -> Mapping[str, frozenset[str]]:
    """Returns the rules that match somewhere, by class and role or by fact."""
    found: dict[str, set[str]] = defaultdict(set)
    for rule in {rule for read in cases for rule in read.fired}:
        found[group_of_rule(rules.by_id[rule])].add(rule)
    return {name: frozenset(found[name]) for name in sorted(found)}


def group_of_rule(rule: FailureRule) -> str:
    return f"{rule.cls} {rule.signature.role}" if rule.cls else f"fact {rule.signature.fact or rule.signature.role}"


@dataclass(frozen=True, slots=True)
class Effect:
    """What the removal of something changes: cases with another class, with other culprits, and the gain of each."""

    name: str
    classes: int
    culprits: int
    classes_gained: int
    culprits_gained: int
    failed: bool = False
    """Whether nothing can be judged without it."""

    def line(self) -> str:
        if self.failed:
            return f"{self.name:58}{'cannot be removed':>20}"
        gain = f"{self.classes_gained:+d} {self.culprits_gained:+d}"
        return f"{self.name:58}{self.classes:8}{self.culprits:10}{gain:>12}"


def effect(name: str, before: Sequence[Answer], after: Sequence[Answer]) -> Effect:
    pairs = list(zip(before, after, strict=True))
    return Effect(
        name,
        sum(one.said[0] != other.said[0] for one, other in pairs),
        sum(one.said[1] != other.said[1] for one, other in pairs),
        share(after)[0] - share(before)[0],
        share(after)[2] - share(before)[2],
    )


def group_effects(cases: Sequence[ReadCase], rules: KnowledgeBase, plain: Sequence[Answer]) -> list[Effect]:
    """Returns the effect of each group of rules."""
    found = []
    for name, group in rule_groups(cases, rules).items():
        after = [answer(read, rules, group) if group & read.fired else own
                 for read, own in zip(cases, plain, strict=True)]  # fmt: skip
        found.append(effect(name, plain, after))
    return found


def function_effects(
    cases: Sequence[ReadCase], rules: KnowledgeBase, plain: Sequence[Answer], only: str = ""
) -> list[Effect]:
    """Returns the effect of each function of `doctor.judge` whose name contains `only`."""
    chosen = [each for each in removals() if only in each.name]
    callers: dict[str, list[int]] = defaultdict(list)
    for at, read in enumerate(cases):
        for name in called_functions(lambda read=read: answer(read, rules)):  # type: ignore[misc]
            callers[name].append(at)
    return [_function_effect(each, cases, rules, plain, callers[each.function]) for each in chosen]


def _function_effect(
    removal: Removal, cases: Sequence[ReadCase], rules: KnowledgeBase, plain: Sequence[Answer], callers: Sequence[int]
) -> Effect:
    after = list(plain)
    with removal.applied():
        for at in callers:
            try:
                after[at] = answer(cases[at], rules)
            except Exception:  # noqa: BLE001 - without its parts the judge may fail in any way
                return Effect(removal.name, 0, 0, 0, 0, failed=True)
    return effect(removal.name, plain, after)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__.splitlines()[0])
    parser.add_argument("corpora", nargs="*", type=Path, metavar="CORPUS", help="folders with truth.json and jobs/")
    parser.add_argument("--no-ablation", action="store_true", help="without the effect of each rule and function")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the functions, those with TEXT in their name")
    parser.add_argument("--by-framework", action="store_true", help="also right classes by framework, with intervals")
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers, plain and with rules left out")
    options = parser.parse_args()
    began = time.process_time()
    rules = load_knowledge()
    try:
        cases = read_cases(options.corpora or own_corpora(), rules)
    except ValueError as error:
        parser.error(str(error))
    read_s = time.process_time() - began
    began = time.process_time()
    plain = [answer(read, rules) for read in cases]
    own = left_out_answers(cases, rules, by_case)
    family = left_out_answers(cases, rules, by_family)
    judged_s = time.process_time() - began
    print(f"{'':26}{'class right':>17}   {'culprits right':>17}   confident errors   false alarms")
    for name, answers in (("plain", plain), ("own signatures left out", own), ("family left out", family)):
        print(score_line(name, answers))
    for name, count in sorted(Counter(read.case.family for read in cases).items(), key=lambda each: -each[1]):
        print(score_line(f"  {name} ({count})", [each for each in family if each.case.family == name]))
    print(f"\nread in {read_s:.1f} s of CPU, judged three times in {judged_s:.1f} s\n")
    print("\n".join(calibration_lines(own)))
    if options.by_framework:
        print("\n".join(["\nright classes, plain, and the 95% interval of their share", *framework_lines(plain)]))
    if options.wrong:
        print("\nwrong: case, plain; own signatures left out")
        for one, other in zip(plain, own, strict=True):
            if not (
                one.class_right and other.class_right and one.culprits_right is not False is not other.culprits_right
            ):
                print(_wrong_line(one, other))
    if not options.no_ablation:
        print_ablation(cases, rules, plain, options.only)


def _wrong_line(one: Answer, other: Answer) -> str:
    def shown(each: Answer) -> str:
        marks = ("" if each.class_right else " WRONG") + (" CULPRITS" if each.culprits_right is False else "")
        names = ", ".join(
            str(culprit.rank if culprit.rank is not None else culprit.host or culprit.name)
            for culprit in each.verdict.culprits[:6]
        )
        return f"{each.verdict.cause} {each.verdict.confidence:.2f} [{names}]{marks}"

    return f"{one.case.name} ({'/'.join(sorted(one.case.classes))}): {shown(one)}; {shown(other)}"


def print_ablation(cases: Sequence[ReadCase], rules: KnowledgeBase, plain: Sequence[Answer], only: str) -> None:
    """Prints the effect of each rule group and function, and the time that took."""
    began = time.process_time()
    for title, effects in (
        ("without the signatures", [] if only else group_effects(cases, rules, plain)),
        ("with the function answering", function_effects(cases, rules, plain, only)),
    ):
        changing = [each for each in effects if each.classes or each.culprits or each.failed]
        print(f"\n{title:58}{'classes':>8}{'culprits':>10}{'right':>12}")
        for each in sorted(changing, key=lambda each: (each.failed, -each.classes - each.culprits)):
            print(each.line())
        idle = [each.name for each in effects if each not in changing]
        print(f"without effect on any case ({len(idle)}): {', '.join(idle)}")
    print(f"\nablation in {time.process_time() - began:.0f} s of CPU")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
