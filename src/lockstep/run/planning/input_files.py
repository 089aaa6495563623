"""The inputs of a run that a Python program gave as objects: files in the run's folder, which its config names.

The name of a file contains the digest of its content. So the digest is recorded with the config, and a run does not
resume with other data or another function than it began with.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.base.folders import make_folder, write_atomically
from lockstep.base.text import count_noun
from lockstep.ledger.durable_files import sha256_file
from lockstep.ledger.run_folder import INPUTS_FOLDER, holds_only_inputs
from lockstep.run.errors import RunRefused

DIGEST_CHARS = 16
"""The part of the SHA-256 digest, in hexadecimal, that names a file."""
_NAME = re.compile(rf"\w+-(?P<digest>[0-9a-f]{{{DIGEST_CHARS}}})\.\w+")


def input_path(run: Path, stem: str, digest: str, suffix: str) -> Path:
    """The path of an input: `RUN/inputs/data-0123456789abcdef.jsonl`.

    Args:
        digest: the SHA-256 of its content, in hexadecimal.
        suffix: with its dot.
    """
    return run / INPUTS_FOLDER / f"{stem}-{digest[:DIGEST_CHARS]}{suffix}"


@contextmanager
def written_inputs(run: Path, contents: Mapping[Path, bytes]) -> Iterator[None]:
    """Writes the inputs of a run that does not exist yet. If the run is not created inside, they are removed.

    Raises:
        OSError: a file cannot be written.
    """
    if not contents:
        yield
        return
    if run.exists() and not holds_only_inputs(run):  # of another run, or of no run: the caller refuses this
        yield
        return
    try:
        make_folder(run / INPUTS_FOLDER)
        for path, content in contents.items():
            write_atomically(path, content)
        yield
    finally:
        if holds_only_inputs(run):
            for path in contents:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # another process has inputs there
                (run / INPUTS_FOLDER).rmdir()
                run.rmdir()


def check_known_inputs(run: Path, contents: Mapping[Path, bytes]) -> None:
    """Raises RunRefused if the inputs of a run to resume are not those with which it began."""
    missing = [path.name.partition("-")[0] for path in contents if not path.is_file()]
    if missing:
        raise RunRefused(
            f"{run} cannot resume with other inputs than it began with, and {' and '.join(missing)} "
            f"{'differs' if len(missing) == 1 else 'differ'}: leave the argument out, or start a new run (name=...)"
        )


def check_inputs(run: Path) -> None:
    """Raises RunRefused if a file in the run's folder of inputs has changed since it was written."""
    folder = run / INPUTS_FOLDER
    named = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    changed = [path for path, name in named if name and not sha256_file(path).startswith(name["digest"])]
    if changed:
        files = count_noun(len(changed), "input file")
        raise RunRefused(
            f"{files} of {run} changed since the run began ({', '.join(sorted(each.name for each in changed))}): "
            "restore the content, or start a new run (name=...)"
        )
