"""Where the images of a row belong in its prompt: markers in texts, and parts of messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.base.text import count_noun
from lockstep.data.dataset_rows import BadRow

MARKER = "<image>"
"""Stands for an image in a text, as in the data of LLaVA, VLM-R1, verl, EasyR1 and ms-swift."""
_IMAGE_KINDS = ("image", "image_url", "input_image")
_DATA_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
_OTHER_KINDS = ("video", "audio", "video_url", "input_audio", "audio_url")

_REMEDY = "Replace the image, leave the row out, or set data.images.on_error to skip."

_Message = dict[str, Any]
_Content = str | list[_Message]


class UnusableImage(BadRow):
    """An image of a row is missing, damaged, too large, or nothing that a model can read."""

    def __init__(self, source: str, problem: str, remedy: str = _REMEDY) -> None:
        super().__init__(None, f"image {source!r} {problem}", remedy)
        self.source = source


def row_values(value: Any) -> list[Any]:
    """The images in a column: one, or a list, in which Arrow may have written nothing."""
    if value is None or value == "":
        return []
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [each for each in value if each is not None]
    return [value]


def has_parts(content: _Content | None) -> bool:
    """Whether a message consists of parts."""
    return isinstance(content, list) and any(isinstance(message.get("content"), list) for message in content)


def place_images(prompt: _Content, values: Sequence[Any], column: str | None) -> tuple[_Content, list[Any]]:
    """Returns the prompt with one marker (in a text) or one part `{"type": "image"}` (in messages) for each image, and
    the images in this order.

    Images are where the data has them: parts of messages, which may hold the image itself; else the markers `<image>`
    in the text of messages that are not the assistant's; else they come first in the first message of a user, as with
    VLM-R1 and TRL.

    Args:
        values: the images of the row's column, which parts and markers stand for in this order.
        column: its name; None if the data has no such column: then markers are text.

    Raises:
        BadRow: there are more or fewer parts or markers than images, or a part is a video or a sound.
    """
    if isinstance(prompt, str):
        found = prompt.count(MARKER) if values or column is not None else 0
        if found not in (0, len(values)):
            raise _mismatch(column, found, len(values))
        return (prompt if found else MARKER * len(values) + prompt), list(values)
    if any(_is_image(part) for part in _parts_of(prompt)):
        return _fill_parts(prompt, list(values), column)
    if not values and column is None:
        return prompt, []
    found = sum(text.count(MARKER) for message in prompt for text in _marked_texts(message))
    if found == 0 and values:
        return _put_first(prompt, len(values), column), list(values)
    if found != len(values):
        raise _mismatch(column, found, len(values))
    return [_split_message(message) for message in prompt], list(values)


def split_at_markers(text: str) -> list[dict[str, Any]]:
    """Returns a text as parts: text, and one `{"type": "image"}` for each marker."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(MARKER)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _mismatch(column: str | None, found: int, count: int) -> BadRow:
    problem = f"the prompt has {count_noun(found, 'marker')} {MARKER} and the row has {count_noun(count, 'image')}"
    return BadRow(column, problem, "Write one marker for each image, or none to have the images first.")


def _parts_of(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _is_image(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    if kind in _OTHER_KINDS:
        raise BadRow(None, f"a message has a part of type {kind!r}", "Only text and images are read: extract frames.")
    return kind in _IMAGE_KINDS


def _fill_parts(
    messages: Sequence[_Message], values: list[Any], column: str | None
) -> tuple[list[_Message], list[Any]]:
    """Takes the images out of parts; those without one get the next value of the column."""
    found: list[Any] = []
    left = list(values)

    def emptied(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if not _is_image(part):
            # Arrow sets the fields of other kinds of parts to null.
            return {name: value for name, value in part.items() if value is not None}
        own = next((part[key] for key in _DATA_KEYS if part.get(key) is not None), None)
        if own is None and not left:
            raise BadRow(column, "a message has a part for an image, and there is no image for it", "Add the image.")
        found.append(left.pop(0) if own is None else own)
        return {"type": "image"}

    made = [
        {**message, "content": [emptied(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    if left and len(left) != len(values):
        problem = f"{count_noun(len(values), 'image')} for {len(values) - len(left)} empty parts of messages"
        raise BadRow(column, f"there are {problem}", "Write one part for each image.")
    if left and len(found) != len(left):
        raise BadRow(column, f"no part of a message is for the {count_noun(len(left), 'image')}", "Add parts for them.")
    return made, found


def _marked_texts(message: _Message) -> list[str]:
    """The texts of a message in which markers count."""
    content = message.get("content")
    if message.get("role") == "assistant":
        return []
    if isinstance(content, str):
        return [content]
    return [str(part["text"]) for part in content or [] if isinstance(part, dict) and part.get("text") is not None]


def _split_message(message: _Message) -> _Message:
    if not any(MARKER in text for text in _marked_texts(message)):
        return message
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": split_at_markers(content)}
    parts: list[Any] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("text") is not None
        parts += split_at_markers(str(part["text"])) if is_text else [part]
    return {**message, "content": parts}


def _put_first(messages: Sequence[_Message], count: int, column: str | None) -> list[_Message]:
    at = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise BadRow(column, "the row has images, and no message of a user to show them in", "Add one.")
    content = messages[at]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    first = {**messages[at], "content": [{"type": "image"}] * count + text}
    return [*messages[:at], first, *messages[at + 1 :]]


def shown_values(value: Any) -> Any:
    """Returns what reward functions get of a column of images: paths as they are, `image N` for an image that the data
    holds itself."""
    if isinstance(value, list | tuple):
        return [_shown(each, number) for number, each in enumerate(value)]
    return None if value is None else _shown(value, 0)


def _shown(value: Any, number: int) -> str:
    if isinstance(value, Mapping):
        value = value.get("path")
    return value if isinstance(value, str) and not value.startswith("data:") else f"image {number}"
