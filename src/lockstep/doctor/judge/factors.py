"""The questions by which hypotheses about a job are weighed, each answered yes, no, or not at all.

`weights.yaml` has the log-odds that a yes adds; `python -m benchmarks.fit_diagnosis` fits them. The first line of a
factor's docstring is what a verdict says about a yes.
"""

from collections.abc import Callable, Mapping

from lockstep.doctor.judge.hypotheses import NO_FAULT, FailureHypothesis, JobEvidence, long_before, strength_of
from lockstep.doctor.judge.job_end import was_overcome
from lockstep.doctor.logs.parsed_log import RuleMatch

Factor = Callable[[FailureHypothesis, JobEvidence], bool | None]

_EXACT, _LIKELY, _POSSIBLE, _FAINT = 0.85, 0.7, 0.5, 0.35
"""The least strengths of the tiers of signatures."""
_SEEN, _HINTED = 0.65, 0.5
"""The least strengths of the tiers of what detectors propose."""
_SECOND = 0.4
"""The least strength of a second signature that counts."""
_HEALTHY = 0.3


def _strength(one: FailureHypothesis, job: JobEvidence) -> float | None:
    """Returns the strength of the strongest signature, of those whose lines ended the job if there are any; None if
    there is no signature."""
    ended = [strength_of(each) for each in one.signed if job.stopped(each)]
    return max(ended or [strength_of(each) for each in one.signed], default=None)


def _is_strong(one: FailureHypothesis, job: JobEvidence) -> bool:
    strength = _strength(one, job)
    fault = one.cls not in NO_FAULT and not one.victim and strength is not None and strength >= _POSSIBLE
    return fault and any(job.stopped(each) for each in one.signed)


def _proposed(one: FailureHypothesis) -> float | None:
    """Returns the weight of the strongest proposal that does not only rest on lines that signatures match too."""
    signed = {(each.file, each.line) for each in one.signed}
    return next(
        (each.weight for each in one.proposed if each.culprits or not each.sites or not each.sites <= signed), None
    )


def exact(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A quoted line has hardly any other cause."""
    strength = _strength(one, job)
    return None if strength is None else strength >= _EXACT


def likely(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A quoted line usually has this cause."""
    strength = _strength(one, job)
    return None if strength is None else _LIKELY <= strength < _EXACT


def possible(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A quoted line often has this cause."""
    strength = _strength(one, job)
    return None if strength is None else _POSSIBLE <= strength < _LIKELY


def faint(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A quoted line sometimes has this cause."""
    strength = _strength(one, job)
    return None if strength is None else _FAINT <= strength < _POSSIBLE


def several(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Independent lines agree."""
    strong = {each.rule.id for each in one.signed if strength_of(each) >= _SECOND and job.stopped(each)}
    return len(strong) > 1 if one.signed else None


def structure(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The structure of the job shows it."""
    weight = _proposed(one)
    return None if weight is None else weight >= _SEEN


def hinted(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The structure of the job suggests it."""
    weight = _proposed(one)
    return None if weight is None else _HINTED <= weight < _SEEN


def guessed(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The structure of the job allows it."""
    weight = _proposed(one)
    return None if weight is None else weight < _HINTED


def same_line(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Its lines say something more specific."""
    rivals = [each for each in job.hypotheses
              if each is not one and each.signed and each.cls not in NO_FAULT
              and each.victim <= one.victim and each.signed[0] not in each.explained]  # fmt: skip
    own = max(_strength(one, job) or 0.0, *(each.weight for each in one.proposed), 0.0)
    sites = one.sites & job.raised.keys() or one.sites
    return any(sites <= each.sites and (_strength(each, job) or 0.0) > own for each in rivals) if sites else None


def first(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """It came before the other failures."""
    rivals = [each for each in job.hypotheses if each is not one and _is_strong(each, job)]
    return job.since(one) <= min(map(job.since, rivals)) if rivals and one.matches else None


def late(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Another failure came long before it."""
    if not one.matches:
        return None
    own = one.matches[0]
    begin = job.first_of_chain((own.file, own.line))
    earlier = [match for each in job.hypotheses if each is not one and _is_strong(each, job) for match in each.signed]
    return any(long_before(each, own) and job.stopped(each) and job.first_of_chain((each.file, each.line)) != begin
               for each in earlier)  # fmt: skip


def ends_stuck(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Somebody ended a job that had failed long before."""
    if one.cls != "external_kill" or not one.matches:
        return None
    failures = [each for each in job.history.failures if each.rule.signature.fact != "cancelled"]
    signed = [match for each in job.hypotheses if each is not one for match in each.signed]
    earlier = [*failures, *(each for each in signed if strength_of(each) >= _POSSIBLE)]
    earlier = [each for each in earlier if each.when is not None or each.rule.signature.role != "victim"]
    return any(long_before(each, one.matches[0]) and job.stopped(each) for each in earlier)


def survived(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The job continued after it."""
    return all(job.history.continued_after(each) for each in one.matches) if one.matches else None


def outside(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Its lines are dated outside the job."""
    return all(job.history.outside_job(each) for each in one.matches) if one.matches else None


def disproved(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The job ended well all the same."""
    return "ended_well" in job.history.traits


def victim(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Only its consequences are there."""
    return one.victim and not one.proposed


def explained(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """All its lines follow from another failure."""
    return one.signed[0] in one.explained if one.signed else None


def ended_well(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The job reports success, and nothing fatal follows."""
    return "ended_well" in job.history.traits


def running(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The job makes steps until the end of its logs."""
    return None if "ended_well" in job.history.traits else {"running", "progressed"} <= job.history.traits


def idle(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """Nothing failed, and no steps are reported."""
    return None if "ended_well" in job.history.traits else "progressed" not in job.history.traits


def healthy(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A line says that nothing is wrong."""
    return any(each.rule.signature.strength >= _HEALTHY for each in job.healthy)


def troubled(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """The last lines report trouble."""
    return None if "ended_well" in job.history.traits else job.history.ends_with_trouble


def _stays(match: RuleMatch, one: FailureHypothesis, job: JobEvidence) -> bool:
    """Whether the job is not known to have survived what a match of a hypothesis reports."""
    survived_it = job.history.continued_after(match) or (one.victim and was_overcome(job.history, match))
    return strength_of(match) >= _HEALTHY and not survived_it


def faulty(one: FailureHypothesis, job: JobEvidence) -> bool | None:
    """A failure is reported that the job is not known to have survived."""
    if "ended_well" in job.history.traits:
        return False
    return any(each.proposed or any(_stays(match, each, job) for match in each.signed)
               for each in job.hypotheses if each is not one)  # fmt: skip


FAULT_FACTORS: Mapping[str, Factor] = {
    each.__name__: each
    for each in (exact, likely, possible, faint, several, structure, hinted, guessed, same_line, first, late,
                 ends_stuck, survived, outside, disproved, victim, explained)
}  # fmt: skip
BENIGN_FACTORS: Mapping[str, Factor] = {
    each.__name__: each for each in (ended_well, running, idle, healthy, troubled, faulty)
}
PROOF = ("exact", "structure")
"""Factors of which one must hold for a verdict to be confirmed: a wording without another cause, or the structure."""
UNMISTAKABLE = ("exact", "ended_well")
"""Factors of which one must hold for the highest confidence. The structure shows which rank, and rarely why."""


def answer_factors(one: FailureHypothesis, job: JobEvidence) -> dict[str, bool | None]:
    """Answers the factors that apply to a hypothesis."""
    factors = BENIGN_FACTORS if one.cls == "benign" else FAULT_FACTORS
    return {name: factor(one, job) for name, factor in factors.items()}


def factor_text(name: str) -> str:
    """Returns what a verdict says about a yes."""
    return ({**FAULT_FACTORS, **BENIGN_FACTORS}[name].__doc__ or "").strip()
