"""A job of the set-aside corpus: the script that makes it and what is true about it, in one entry."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """A job, its truth, and how it is made."""

    name: str
    framework: str
    cls: str
    script: str = ""
    """bash, run in a project folder with `$S` (scripts), `$OUT` (the job's folder) and the venv's programs on the
    path. What it prints becomes `job.log`. Empty: a re-told job, which is stored as it is."""
    culprit: tuple[Any, ...] | None = None
    alt: tuple[tuple[Any, ...], ...] = ()
    also_ok: tuple[str, ...] = ()
    sufficiency: str = "root"
    venv: str = "train"
    """train, scale or lightning."""
    host: str = "gpu-node-07"
    home: str = "/home/user/project"
    limit_s: int = 300
    source: str = ""
    """A public issue thread that quotes what a re-told job prints."""

    def truth(self) -> dict[str, Any]:
        """Returns the entry of `truth.json`."""
        return {
            "also_ok": list(self.also_ok),
            "class": self.cls,
            "culprit": list(self.culprit) if self.culprit else None,
            "culprit_alt": [list(each) for each in self.alt],
            "fix": "",
            "framework": self.framework,
            "made": "ran" if self.script else "told",
            "sufficiency": self.sufficiency,
        }


def told(name: str, framework: str, cls: str, repository: str, number: int, **about: Any) -> Entry:
    """Returns the entry of a job that is re-told after an issue thread of a repository on GitHub.

    Args:
        repository: Owner and name.
        number: That of the thread.
        about: The other fields of the entry.
    """
    return Entry(name, framework, cls, source=f"https://github.com/{repository}/issues/{number}", **about)
