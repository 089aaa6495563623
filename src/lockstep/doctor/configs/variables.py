"""What a script sets in the environment, as the environment lint judges it."""

import re
from collections.abc import Mapping

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.settings import NOWHERE
from lockstep.doctor.configs.shell import Word
from lockstep.doctor.configs.timeouts import UNREAD
from lockstep.doctor.environment.lint import Place, lint


def judge(advice: Advice, variables: Mapping[str, Word]) -> None:
    """Errors and warnings of the lint, at the lines that set the variables; time-outs are told by `timeouts`."""
    given = {name: word.text for name, word in variables.items() if word.known and name not in UNREAD}
    for found in lint([Place("", given)]) if given else []:
        if found.severity in ("error", "warning"):
            named = next((name for name in re.findall(r"\w+", found.seen) if name in given), None)
            at = variables[named].place if named is not None else NOWHERE
            advice.say(found.id, found.severity, found.seen, found.why, found.fix, found.source, at)
