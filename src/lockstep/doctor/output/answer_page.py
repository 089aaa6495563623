"""Renders an answer as one self-contained HTML page."""

from typing import TYPE_CHECKING, Any

from lockstep.base.secure_html import with_strict_policy
from lockstep.base.text import count_noun, terminal_safe
from lockstep.doctor.output.explanation import answer_rows, culprit_text, place_of
from lockstep.doctor.output.job_answer import JobAnswer
from lockstep.doctor.output.rank_timeline import build_rank_timeline
from lockstep.watch.diagnosis.verdict import VerdictKind

if TYPE_CHECKING:
    from jinja2 import Environment

_IN_SECTIONS = {"collective": "Collective", "waiting": "Waiting", "results": "Results"}


def answer_page(answer: JobAnswer) -> str:
    """Renders the page: verdict, culprits, evidence, alternatives, fix and a line of time per rank.

    All text from logs is escaped, and the page's policy forbids scripts and requests.
    """
    verdict = answer.verdict
    rows: dict[str, list[str]] = {}
    name = ""
    for label, text in answer_rows(answer):
        name = label or name
        rows.setdefault(name, []).append(text)
    culprits = [culprit_text(each, full=answer.recorded) for each in verdict.culprits]
    timeline = build_rank_timeline(answer.logs, {each.rank for each in verdict.culprits if each.rank is not None})
    context: dict[str, Any] = {
        "title": answer.title,
        "healthy": answer.healthy,
        "cause": verdict.cause,
        "kind": "" if verdict.kind is VerdictKind.UNKNOWN else str(verdict.kind),
        "confidence": f"{verdict.confidence:.2f}",
        "explanation": verdict.explanation,
        "sections": [
            ("Culprit" if len(culprits) == 1 else "Culprits", culprits),
            *((title, rows.get(row, [])) for row, title in _IN_SECTIONS.items()),
            ("Environment", list(answer.environment)),
        ],
        "evidence": [(fact.text, place_of(fact)) for fact in verdict.evidence],
        "others": answer.others,
        "fix": verdict.fix,
        "collect": verdict.collect,
        "timeline": timeline,
        "undated": count_noun(timeline.undated, "rank"),
    }
    return with_strict_policy(_jinja_environment().get_template("answer.html.j2").render(context))


def _jinja_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only `--html` needs it

    return Environment(
        loader=PackageLoader("lockstep.doctor.output"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: terminal_safe(value) if type(value) is str else value,
    )
