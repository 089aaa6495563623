"""Where the images and videos of a row belong in its prompt: markers in texts, and parts of messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.base.text import IMAGE_MARKER, IMAGE_PARTS, count_noun
from lockstep.data.dataset_rows import BadRow

MARKER, VIDEO_MARKER = IMAGE_MARKER, "<video>"
"""Stand for an image and for a video in a text, as in the data of LLaVA, VLM-R1, verl, EasyR1 and ms-swift."""
VIDEO_PARTS = ("video", "video_url", "input_video")
"""The types that a message's part with a video may have."""
_PART_KINDS = {
    "image": IMAGE_PARTS,
    "video": VIDEO_PARTS,
}
_DATA_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
VIDEO_KEYS = ("bytes", "video", "video_url", "path", "url", "frames")
"""Where a part of a message, or the value of a column, has its video."""
_OTHER_KINDS = ("audio", "input_audio", "audio_url")
_VALUE = "value of the data"
"""The key of a part for what its image or video is in the data, until `place_media` takes it out."""

_REMEDY = "Replace the {what}, leave the row out, or set data.images.on_error to skip."

_Message = dict[str, Any]
_Content = str | list[_Message]


class UnusableImage(BadRow):
    """An image of a row is missing, damaged, too large, or nothing that a model can read."""

    what = "image"

    def __init__(self, source: str, problem: str, remedy: str | None = None) -> None:
        super().__init__(None, f"{self.what} {source!r} {problem}", remedy or _REMEDY.format(what=self.what))
        self.source, self.problem = source, problem


class UnusableVideo(UnusableImage):
    """A video of a row is missing, damaged, too large, or nothing that can be decoded."""

    what = "video"


@dataclass(frozen=True, slots=True)
class RowVideo:
    """A video of a row as it is in the data: a path, bytes, a list of frames, or a mapping with one of these."""

    value: Any


@dataclass(frozen=True, slots=True)
class MediaColumn:
    """The images, or the videos, that a row has in a column. Parts and markers stand for them in this order."""

    kind: Literal["image", "video"]
    name: str | None = None
    """Of the column; None if the data has none: then markers are text."""
    values: list[Any] = field(default_factory=list)

    @property
    def marker(self) -> str:
        return MARKER if self.kind == "image" else VIDEO_MARKER

    @property
    def has_markers(self) -> bool:
        """Whether markers stand for something, and are not text."""
        return bool(self.values) or self.name is not None

    def mismatch(self, found: int) -> BadRow:
        """The error about another number of markers than values."""
        count = count_noun(len(self.values), self.kind)
        problem = f"the prompt has {count_noun(found, 'marker')} {self.marker} and the row has {count}"
        remedy = f"Write one marker for each {self.kind}, or none to have the {self.kind}s first."
        if self.kind == "video":
            remedy += " In a column, the frames of one video are a list of their own."
        return BadRow(self.name, problem, remedy)


def row_values(value: Any) -> list[Any]:
    """The images or videos in a column: one, or a list, in which Arrow may have written nothing."""
    if value is None or value == "":
        return []
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [each for each in value if each is not None]
    return [value]


def has_parts(content: _Content | None) -> bool:
    """Whether a message consists of parts."""
    return isinstance(content, list) and any(isinstance(message.get("content"), list) for message in content)


def place_media(prompt: _Content, columns: Sequence[MediaColumn]) -> tuple[_Content, list[Any]]:
    """Returns the prompt with one marker (in a text) or one part `{"type": "image"}` or `{"type": "video"}` (in
    messages) for each image and video, and what they are in the data, in this order.

    They are where the data has them: parts of messages, which may hold the image or video itself; else the markers
    `<image>` and `<video>` in the text of messages that are not the assistant's; else they come first in the first
    message of a user, as with VLM-R1 and TRL: images before videos.

    Args:
        columns: the row's images, then its videos.

    Raises:
        BadRow: there are more or fewer parts or markers than images or videos, or a part is a sound.
    """
    if isinstance(prompt, str):
        return _place_in_text(prompt, columns)
    for column in reversed(columns):  # images come before videos that were put first
        prompt = _place_in_messages(prompt, column)
    found: list[Any] = []

    def emptied(part: Any) -> Any:
        if not isinstance(part, dict) or _VALUE not in part:
            return part
        found.append(part[_VALUE])
        return {"type": part["type"]}

    return _with_contents(prompt, lambda content: [emptied(part) for part in content]), found


def _place_in_text(prompt: str, columns: Sequence[MediaColumn]) -> tuple[str, list[Any]]:
    if not any(column.has_markers for column in columns):
        return prompt, []
    is_any = any(column.values for column in columns)
    first = ""
    for column in columns:
        found = prompt.count(column.marker) if column.has_markers or (is_any and column.kind == "image") else 0
        if found not in (0, len(column.values)):
            raise column.mismatch(found)
        first += "" if found else column.marker * len(column.values)
    prompt = first + prompt
    left = {column.marker: list(map(_kept(column), column.values)) for column in columns if column.values}
    places = sorted((at, marker) for marker in left for at in _positions(prompt, marker))
    return prompt, [left[marker].pop(0) for _, marker in places]


def _positions(text: str, marker: str) -> Iterable[int]:
    at = text.find(marker)
    while at >= 0:
        yield at
        at = text.find(marker, at + 1)


def _kept(column: MediaColumn) -> Any:
    return RowVideo if column.kind == "video" else lambda value: value


def _place_in_messages(messages: list[_Message], column: MediaColumn) -> list[_Message]:
    """Puts the values of a column into parts, beside their types."""
    if any(_is_kind(part, column.kind) for part in message_parts(messages)):
        return _fill_parts(messages, column)
    if not column.has_markers:
        return messages
    found = sum(text.count(column.marker) for message in messages for text in _marked_texts(message))
    filled = [{"type": column.kind, _VALUE: _kept(column)(value)} for value in column.values]
    if found == 0 and filled:
        return _put_first(messages, filled, column)
    if found != len(filled):
        raise column.mismatch(found)
    left = list(filled)
    return [_split_message(message, column.marker, left) for message in messages]


def split_at_markers(text: str, marker: str = MARKER) -> list[dict[str, Any]]:
    """Returns a text as parts: text, and one `{"type": "image"}` for each marker of images."""
    kind = "image" if marker == MARKER else "video"
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(marker)):
        if number:
            parts.append({"type": kind})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def message_parts(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    """Returns the parts of all messages that consist of parts."""
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _with_contents(messages: Sequence[_Message], change: Any) -> list[_Message]:
    """The messages with changed lists of parts."""
    return [
        {**message, "content": change(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


def _is_kind(part: dict[str, Any], wanted: str) -> bool:
    kind = part.get("type")
    if kind in _OTHER_KINDS:
        raise BadRow(None, f"a message has a part of type {kind!r}", "Only text, images and videos are read.")
    return kind in _PART_KINDS[wanted]


def _own_value(part: dict[str, Any], kind: str) -> Any:
    """What a part has itself; None if it stands for a value of the column."""
    if kind == "image":
        return next((part[key] for key in _DATA_KEYS if part.get(key) is not None), None)
    given = {name: value for name, value in part.items() if name != "type" and value is not None}
    return RowVideo(given) if any(name in given for name in VIDEO_KEYS) else None


def _fill_parts(messages: Sequence[_Message], column: MediaColumn) -> list[_Message]:
    """Gives parts that have no image or video themselves the next value of the column."""
    kind, name, values = column.kind, column.name, column.values
    taken = 0
    left = list(map(_kept(column), values))

    def filled(part: Any) -> Any:
        nonlocal taken
        if not isinstance(part, dict) or _VALUE in part:
            return part
        if not _is_kind(part, kind):
            # Arrow sets the fields of other kinds of parts to null.
            return {name: value for name, value in part.items() if value is not None}
        own = _own_value(part, kind)
        if own is None and not left:
            article = "an" if kind == "image" else "a"
            problem = f"a message has a part for {article} {kind}, and there is no {kind} for it"
            raise BadRow(name, problem, f"Add the {kind}.")
        taken += 1
        return {"type": kind, _VALUE: left.pop(0) if own is None else own}

    made = _with_contents(messages, lambda content: [filled(part) for part in content])
    if left and len(left) != len(values):
        problem = f"{count_noun(len(values), kind)} for {len(values) - len(left)} empty parts of messages"
        raise BadRow(name, f"there are {problem}", f"Write one part for each {kind}.")
    if left and taken != len(left):
        raise BadRow(name, f"no part of a message is for the {count_noun(len(left), kind)}", "Add parts for them.")
    return made


def _marked_texts(message: _Message) -> list[str]:
    """The texts of a message in which markers count."""
    content = message.get("content")
    if message.get("role") == "assistant":
        return []
    if isinstance(content, str):
        return [content]
    return [str(part["text"]) for part in content or [] if isinstance(part, dict) and part.get("text") is not None]


def _split_message(message: _Message, marker: str, left: list[dict[str, Any]]) -> _Message:
    """A message with the next of the parts in place of each marker."""
    if not any(marker in text for text in _marked_texts(message)):
        return message
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts: list[Any] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("text") is not None
        pieces = split_at_markers(str(part["text"]), marker) if is_text else [part]
        parts += [left.pop(0) if is_text and "text" not in piece else piece for piece in pieces]
    return {**message, "content": parts}


def _put_first(messages: Sequence[_Message], parts: list[dict[str, Any]], column: MediaColumn) -> list[_Message]:
    at = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        problem = f"the row has {column.kind}s, and no message of a user to show them in"
        raise BadRow(column.name, problem, "Add one.")
    content = messages[at]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*messages[:at], {**messages[at], "content": [*parts, *text]}, *messages[at + 1 :]]


def shown_values(value: Any, kind: Literal["image", "video"] = "image") -> Any:
    """Returns what reward functions get of a column: paths as they are, `image N` or `video N` for one that the data
    holds itself."""
    if isinstance(value, list | tuple):
        return [_shown(each, number, kind) for number, each in enumerate(value)]
    return None if value is None else _shown(value, 0, kind)


def _shown(value: Any, number: int, kind: Literal["image", "video"]) -> Any:
    if isinstance(value, list | tuple):  # the frames of a video
        return shown_values(value, kind)
    if isinstance(value, Mapping):
        keys = ("path",) if kind == "image" else ("path", "video", "video_url", "url", "frames")
        value = next((value[key] for key in keys if value.get(key) is not None), None)
        if isinstance(value, list | tuple | Mapping):
            return _shown(value, number, kind)
    return value if isinstance(value, str) and not value.startswith("data:") else f"{kind} {number}"
