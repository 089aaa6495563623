"""Unpickling what a stranger wrote: builtin containers and scalars, and nothing else.

A dump holds dicts, lists, tuples, strings and numbers. Whatever names a class or a function is refused, so that no
callable is ever resolved. How much memory and time a hostile file may take is bounded by the process that reads it
(`worker`): a pickle of few bytes can ask for gigabytes.
"""

import io
import pickle
from typing import Any, NoReturn

_PEEK = 1 << 17
"""Bytes; the unpickler never peeks at more."""


class Refused(pickle.UnpicklingError):
    """The pickle asks for more than containers and scalars."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise Refused(f"asks for {module}.{name}, which no dump of the flight recorder does")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise Refused("asks for a persistent object, which no dump of the flight recorder does")


def loads(data: bytes) -> Any:
    """The object in `data`.

    Raises what the standard library's unpickler raises on truncated or damaged input, which is nearly anything
    (`DAMAGE`); `Refused` for what is not plain data.
    """
    # The unpickler written in C asks a file for every opcode, unless the file lets it peek: four times as slow.
    return _Plain(io.BufferedReader(io.BytesIO(data), _PEEK)).load()


DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    MemoryError, RecursionError, UnicodeError,
)  # fmt: skip
"""What reading a damaged dump may raise."""
