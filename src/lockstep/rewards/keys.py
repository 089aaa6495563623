"""Keys of servers, by the names of the variables that hold them."""

import os
from collections.abc import Mapping

from lockstep.rewards.api import TermError


def key_from(name: str | None, term: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in a variable. TermError where the variable is missing, or holds what no header can."""
    if name is None:
        return None
    key = environment.get(name, "").strip()
    if not key:
        what = "is empty" if name in environment else "is not set"
        remedy = "export it, name another one in api_key_env, or set api_key_env to null for a server that needs no key"
        raise TermError(term, f"the environment variable {name}, which is to hold the key, {what}", remedy)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise TermError(term, f"the environment variable {name} holds characters that no key has", "export it anew")
    return key
