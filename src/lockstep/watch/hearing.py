"""What agents send, from bytes to a message: of 2,000 hosts twice a second, so by msgspec, which makes the records of a
state (most of its bytes) from their text in one go."""

import json
from typing import Any, TypedDict

import msgspec


class _State(TypedDict, total=False):
    """All that a state may hold (`messages`, and what the agent adds); other keys are left out."""

    m: str
    host: Any
    number: Any
    processes: bytes
    members: bytes
    calls: bytes
    stages: Any
    notes: Any
    waits: Any
    about: Any
    sites: Any
    gaps: Any
    calm: Any


_state: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_State)
_any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_STATE = b'{"m": "state"'


def parse(frame: bytes | bytearray) -> dict[str, Any]:
    """The message in a frame; the records of a state as bytes.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        message: dict[str, Any] = (_state if frame.startswith(_STATE) else _any).decode(frame)
    except msgspec.DecodeError:  # JSON as Python writes it has NaN, too
        message = json.loads(frame)
    return message
