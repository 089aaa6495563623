"""What launchers and frameworks call a process of the job that they only number: `rank 3`, `task-3`, `workerlog.3`."""

import re

_ALWAYS = "rank|task|proc(?:ess)?"
"""Words for a process of the job wherever they stand."""
_NAMED = f"{_ALWAYS}|trainer|learner|member|peer|stage|workerlog"
WORDS = f"{_NAMED}|[rw]"
"""Words for one where the name of a process stands. A worker may be a host. `workerlog.3` is a file of Paddle's."""


def numbered(words: str, separators: str) -> str:
    """Returns a pattern for one of some words and its number, the group `label`."""
    return rf"(?:(?:global|local)_?)?(?:{words})(?:_?(?:id|index))?[{separators}]?(?P<label>\d{{1,6}})"


_OF_SIZE = r"(?:[_.-]of[_.-]\d+)?"
LABEL = re.compile(numbered(_ALWAYS, "._-"))
"""A name that a launcher gives a process, in the form of a host."""
_INSTANCE = r"[\w.-]{1,60}@(?P<instance>\d{1,5})"
PARTY = re.compile(rf"(?i)(?:{numbered(f'{_ALWAYS}|trainer', '._-')}|{_INSTANCE})(?:\.service)?")
"""A whole name of a process, among them an instance of a systemd unit."""
_LETTER = "(?<!-)(?-i:[rw])"  # but in the names of models and programs: `open-r1.log`, `VLM-R1/`
FILE_RANK = re.compile(rf"(?i)(?:^|[/_.-]){numbered(f'{_NAMED}|worker|{_LETTER}', '_.-')}(?=[/_.-]|$)")
"""A process in the path of a file."""
NOT_A_HOST = re.compile(rf"(?i){numbered(WORDS, '_.-')}{_OF_SIZE}$")
"""A name that could be a host's."""
FILE_SUFFIX = re.compile(rf"(?i)[_.-]{numbered(WORDS, '_.-')}{_OF_SIZE}$")
"""The process that follows the host in the name of a file."""
