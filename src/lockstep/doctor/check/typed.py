"""Plain data that comes from elsewhere, as types: what does not fit is refused, what is not known is left out."""

import ipaddress
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")

WORDS = 400
"""Letters of what somebody else says, at most, where it is shown."""


def _numeric(address: str) -> str:
    return str(ipaddress.ip_address(address))


Address = Annotated[str, AfterValidator(_numeric)]
"""A number and no name, so that dialling it asks no name server."""
Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=256)]
Digits = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]


def reader(kind: type[T]) -> Callable[[Any], T]:
    """What makes one of that type of data.

    The function raises ValueError, with the first thing that is not as it should be.
    """
    adapter = TypeAdapter(kind)

    def read(data: Any) -> T:
        try:
            return adapter.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where[:80]}: {first['msg'][:WORDS]}") from None

    return read
