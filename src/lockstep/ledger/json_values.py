"""Reads and writes columns of datasets, answers, messages and episodes as JSON, without loss.

Numpy scalars and arrays (as Parquet readers return them) become numbers and lists; tuples become lists. Types that JSON
lacks (bytes, dates, decimals, keys that are not strings) are written with a tag.
"""

import base64
import datetime
import decimal
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.base.json_text import parse_json
from lockstep.data.samples import Episode, PlacedImage

_TAG = "$lockstep"


def dumps(value: Any, where: str = "value") -> str:
    """Returns a value as one line of JSON. A TypeError names `where` and the path in the value that cannot be
    written."""
    return json.dumps(plain_json(value, where), ensure_ascii=True, separators=(",", ":"))


def loads(text: str) -> Any:
    """The value that `dumps` wrote. Raises ValueError if the text is damaged."""
    try:
        return parse_json(text, "a value of the ledger", object_hook=_untag)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"a value of the ledger has a damaged tag: {type(error).__name__} {error}") from error


def plain_json(value: Any, where: str = "value") -> Any:
    """Converts a value to JSON's types."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.datetime64 | np.timedelta64):  # nanoseconds would become integers
        return plain_json(value.astype(f"{value.dtype.str[1:2]}8[us]").item(), where)
    if isinstance(value, np.generic):
        return plain_json(value.item(), where)
    if isinstance(value, np.ndarray):
        return plain_json(value.tolist(), where)
    for kind in (str, int, float):  # subclasses, such as enumerations and the strings of tokenizers
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return _plain_json_dict(value, where)
    return _tag_value(value, where)


def _plain_json_dict(value: dict[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return {str(key): plain_json(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[plain_json(key, f"{where} (key)"), plain_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {_TAG: "dict", "value": pairs}


def _tag_value(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, bytes | bytearray | memoryview):
        return {_TAG: "bytes", "value": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, decimal.Decimal):
        return {_TAG: "decimal", "value": str(value)}
    if isinstance(value, datetime.datetime):
        return {_TAG: "datetime", "value": value.isoformat()}
    if isinstance(value, datetime.date):
        return {_TAG: "date", "value": value.isoformat()}
    if isinstance(value, datetime.time):
        return {_TAG: "time", "value": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written to the ledger: "
        "numbers, strings, bytes, dates, lists and dicts of these can"
    )


def _untag(pairs: dict[str, Any]) -> Any:
    tag = pairs.get(_TAG)
    if tag is None:
        return pairs
    value = pairs["value"]
    match tag:
        case "dict":
            return {tuple(key) if isinstance(key, list) else key: item for key, item in value}
        case "bytes":
            return base64.b64decode(value)
        case "decimal":
            return decimal.Decimal(value)
        case "datetime":
            return datetime.datetime.fromisoformat(value)
        case "date":
            return datetime.date.fromisoformat(value)
        case "time":
            return datetime.time.fromisoformat(value)
        case "timedelta":
            return datetime.timedelta(*value)
    raise ValueError(f"unknown tag {tag!r} in the ledger: it was written by a newer lockstep")


def encode_episode(episode: Episode | None, request: str) -> str | None:
    """Returns an episode as JSON; None without one. A TypeError names the request whose messages cannot be written."""
    if episode is None:
        return None
    fields = [episode.messages, episode.rewards, episode.ended, episode.metrics]
    return dumps(fields, f"episode of completion {request}")


def decode_episode(text: str | None) -> Episode | None:
    return None if text is None else Episode(*loads(text))


def encode_images(images: Sequence[PlacedImage], request: str) -> str | None:
    """Returns the images of a completion as JSON; None without any."""
    return dumps([image.to_json() for image in images], f"images of completion {request}") if images else None


def decode_images(text: str | None) -> list[PlacedImage]:
    return [] if text is None else [PlacedImage.from_json(image) for image in loads(text)]
