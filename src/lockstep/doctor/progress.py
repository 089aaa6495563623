"""Counters of progress on a line: steps, epochs, bars, and the rows that trainers print of their metrics."""

import re

_DIGIT = re.compile(r"\d")
_HEAD = 600
"""Characters of a line that a counter stands in; the rows of a trainer have theirs at the end."""
_STEP = re.compile(
    r"(?:\"(?:step|iteration|global_step|it)\": ?|\b(?:global[_ ]?)?(?:step|steps|iteration|iter|Step|Iteration|Iter"
    r"|STEP|update|batch|Batch|it)(?:s)?[ =:#\[(]{1,12})(?P<step>\d{1,9})(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
    r"|\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<"
    r"|Epoch:? ?\[(?P<epoch>\d+)\](?: ?\[ *(?P<in>\d+)/(?P<last>\d+)\])?"
    r"|\b[Ee]poch[ =:]{1,2}(?P<epochs>\d{1,6})(?:/(?P<epochs_of>\d+))?\b"
    r"|\b(?:rows|samples|requests|prompts|episodes|documents|tasks|images|examples|trials|trajectories)(?: \w+)?"
    r"[ =:]{1,2}(?P<count>\d+)\b|\b(?:rollout|episode|game|sample|request|trial|question) #?(?P<number>\d+)\b"
)
_BAR = re.compile(r"\|\s*(?P<bar>\d{1,9})/(?P<total>\d{1,9}) \[[\d:]+<")
_WITHIN = re.compile(
    r"(?i)\b(?:step|iteration|iter|batch|it)s?[ =:#\[(]{1,12}(?P<step>\d{1,9})(?: ?(?:/|of) *(?P<of>\d{1,9}))?\b"
)
"""What stands after the number of an epoch: `epoch 3 batch 11`."""
_ROW = re.compile(r"\{.*['\"]epoch['\"]: ?['\"]?(?P<at>\d{1,6}(?:\.\d+)?(?:e-?\d{1,2})?)")
"""Of transformers' trainers, and those of TRL, which count in parts of an epoch: `{'loss': 0.61, ..., 'epoch': 0.12}`,
the numbers quoted from release 5 on."""
_PARTS = 1_000_000


def counted(line: str) -> tuple[int, int, int, bool] | None:
    """Epoch, step, total, whether of a progress bar; None where a line counts nothing."""
    if _DIGIT.search(line, 0, 400) is None:
        return None
    found = _STEP.search(line[:_HEAD])
    if found is None or (found["epochs"] and not found["epochs_of"]):
        finer = _finer(line, found)
        if finer is not None:
            return finer
    if found is None:
        return None
    epoch = int(found["epoch"] or found["epochs"] or 0)
    step = found["step"] or found["bar"] or found["in"] or found["count"] or found["number"]
    of = found["of"] or found["total"] or found["last"] or found["epochs_of"] or 0
    return epoch, int(step) if step is not None else 0, int(of), found["bar"] is not None


def _finer(line: str, epoch: re.Match[str] | None) -> tuple[int, int, int, bool] | None:
    """What counts within an epoch: the bar or step after its name, or a row that gives the epoch as a fraction."""
    if epoch is not None:
        bar, within = _BAR.search(line, epoch.end(), _HEAD), _WITHIN.search(line, epoch.end(), _HEAD)
        if bar is not None:
            return int(epoch["epochs"]), int(bar["bar"]), int(bar["total"]), True
        return None if within is None else (int(epoch["epochs"]), int(within["step"]), int(within["of"] or 0), False)
    row = _ROW.search(line) if "{" in line and "epoch" in line else None
    if row is None:
        return None
    whole, part = divmod(float(row["at"]), 1.0)
    return int(whole), round(part * _PARTS), 0, False
