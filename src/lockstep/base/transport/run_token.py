"""The token of a run: the secret that all its processes know, and that no other process may learn or guess.

Whoever has it can run commands through the run's agents. A handshake shows a code that is computed from the token, so
whoever records one can try tokens at leisure: a token must be out of reach of guessing. Nothing else that others can
see, such as a folder's name, is computed from it. A token that begins with `tls:` makes all connections use TLS.
"""

import contextlib
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_private_dir, write_private

TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
"""The variable in which a process gets the token; it removes the variable from its environment."""
MIN_BITS = 96
"""A token that takes fewer guesses than 2 to the power of this is refused."""
TOKEN_COMMAND = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
"""A command that prints a token, without Lockstep."""

RUN_POWER = "runs commands as you"
"""What whoever guesses the token of a run can do."""
REWARD_POWER = "can score texts with your model"
"""What whoever guesses the token of a reward server can do."""

_TLS_PREFIX = "tls:"
_WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}|[0-9]{4,}")
_WORD_BITS = 2.0
"""Bits per character of a word, a name or a number (Shannon 1951 measures less for English)."""


class WeakToken(PicklableError, ValueError):
    """A token can be guessed. `bits` estimates how many guesses it takes, as a power of 2."""

    error_code = "weak_token"

    def __init__(self, name: str, bits: float, power: str) -> None:
        super().__init__(
            f"{name} can be guessed (about {bits:.0f} bits, at least {MIN_BITS} are needed): whoever guesses it "
            f"{power}. Make a random one: export {name}=$({TOKEN_COMMAND})"
        )
        self.name, self.bits, self.power = name, bits, power


def new_run_token(tls: bool = False) -> str:
    """A random token of 256 bits. `tls`: whether the run's connections use TLS."""
    return (_TLS_PREFIX if tls else "") + secrets.token_hex(32)


def uses_tls(token: str) -> bool:
    """Whether connections with this token use TLS."""
    return token.startswith(_TLS_PREFIX)


def with_tls(token: str) -> str:
    """The token that makes connections use TLS."""
    return token if uses_tls(token) else _TLS_PREFIX + token


def check_token(token: str, name: str = TOKEN_VARIABLE, power: str = RUN_POWER) -> str:
    """Returns the token. Raises WeakToken if it can be guessed.

    Args:
        name: where it comes from.
        power: what whoever guesses it can do.
    """
    bits = estimated_bits(token.removeprefix(_TLS_PREFIX))
    if bits < MIN_BITS:
        raise WeakToken(name, bits, power)
    return token


def take_token(process: str) -> str:
    """Removes the token from this process's environment, so that no child inherits it, and returns it.

    Args:
        process: what this process is, for the error.

    Raises:
        ValueError: there is no token, or it can be guessed (WeakToken).
    """
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ValueError(f"{TOKEN_VARIABLE} is not set: {process} needs the run's token")
    return check_token(token)


def estimated_bits(token: str) -> float:
    """A cautious estimate of a token's entropy in bits: words, names and numbers count little, and characters that
    repeat or continue what precedes them count nothing."""
    text = "".join(token.split())
    used = re.sub(r"[-_.:]", "", text)
    if re.fullmatch(r"[0-9a-f]*|[0-9A-F]*", used):  # with separators as well: a UUID
        return math.log2(16 if re.search(r"[a-fA-F]", used) else 10) * _surprising(used)
    alphabets = (r"[a-z]", 26), (r"[A-Z]", 26), (r"[0-9]", 10), (r"[^a-zA-Z0-9]", 2)
    bits = math.log2(sum(size for pattern, size in alphabets if re.search(pattern, text)) or 1)
    words = "".join(_WORD.findall(text))
    return bits * _surprising(_WORD.sub("", text)) + _WORD_BITS * _surprising(words)


def _surprising(text: str) -> int:
    """The number of characters that do not end a repeated triple, and do not continue a sequence such as `1234`."""
    triples: set[str] = set()
    count = min(len(text), 2)
    for end in range(3, len(text) + 1):
        triple = text[end - 3 : end]
        first, second, third = map(ord, triple)
        count += triple not in triples and third - second != second - first
        triples.add(triple)
    return count


def shared_token(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> str:
    """The token that the processes of a user share on several hosts: `LOCKSTEP_TOKEN`, else the content of
    `~/.lockstep/token`, which is made if there is none (hosts that share the home folder share the file).

    Raises: as `token_of_file`.
    """
    if given := environment.get(TOKEN_VARIABLE, ""):
        return check_token(given)
    return token_of_file(token_path(home), TOKEN_VARIABLE)


def token_of_file(path: Path, variable: str, power: str = RUN_POWER) -> str:
    """The token in a file that only the user can read; the file is made, with a random token, if there is none.

    Args:
        variable: the environment variable that the user can set instead, for the errors.
        power: what whoever guesses the token can do.

    Raises:
        WeakToken: the token can be guessed.
        PermissionError: other users can read the file, or own its folder.
    """
    make_private_dir(path.parent, f"remove it, or set {variable}")
    if not os.path.lexists(path):
        _make_token_file(path)
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(
            f"{path}: only you may own and read the token: replace it (rm {path}; it is made again), or set {variable}"
        )
    return check_token(path.read_text().strip(), str(path), power)


def token_path(home: Path | None = None) -> Path:
    """The file that holds a user's token."""
    return (home or Path.home()) / ".lockstep" / "token"


def reward_token_path(home: Path | None = None) -> Path:
    """The file that holds the token of a user's reward servers: another one, as all their clients have and send it."""
    return (home or Path.home()) / ".lockstep" / "reward_token"


def _make_token_file(path: Path) -> None:
    """Makes the file with a new token. If several hosts try at once, one of them succeeds, and all read its token."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_private(draft, f"{new_run_token()}\n".encode())
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
