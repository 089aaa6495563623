"""The text between the frames of a video in a prompt: what the model's own processor writes there, if it has words for
it, and the time of each frame otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lockstep.data.images.image_content import MARKER, VIDEO_MARKER
from lockstep.data.images.video_source import FoundVideo

_Content = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FrameTexts:
    """Format strings of `number` (from 1), `seconds` and `timestamp` (MM:SS) of a frame, and of `count` (in words) and
    `duration` (H:MM:SS) of the video."""

    intro: str = ""
    before: str = "<{seconds:.1f} seconds>"
    """Before each frame. Qwen3-VL's processor writes this one."""
    between: str = ""
    outro: str = ""


_TEXTS: Mapping[str, FrameTexts] = {
    "SmolVLMProcessor": FrameTexts(
        "You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n",
        "\nFrame from {timestamp}:",
        outro="\n\n",
    ),
    "InternVLProcessor": FrameTexts(before="Frame{number}: ", between="\n"),
}
"""What transformers' processors write into a prompt with a video, by the name of their class."""


def write_videos(prompt: _Content, videos: Sequence[FoundVideo], processor: str) -> _Content:
    """Returns the prompt with the frames of the videos, and text between them, in place of each marker or part of a
    video: a marker or a part `{"type": "image"}` for each frame.

    Args:
        videos: in the order of their markers or parts.
        processor: the class of the model's processor.
    """
    texts = _TEXTS.get(processor, FrameTexts())
    left = [_video_parts(video, texts) for video in videos]
    if isinstance(prompt, str):
        pieces = prompt.split(VIDEO_MARKER)
        written = ["".join(part.get("text", MARKER) for part in parts) for parts in left]
        return "".join(each for pair in zip(pieces, [*written, ""], strict=True) for each in pair)

    def filled(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            piece
            for part in content
            for piece in (left.pop(0) if isinstance(part, dict) and part.get("type") == "video" else [part])
        ]

    return [
        {**message, "content": filled(message["content"])} if "content" in message else message for message in prompt
    ]


def _video_parts(video: FoundVideo, texts: FrameTexts) -> list[dict[str, Any]]:
    about = {"count": in_words(len(video.frames)), "duration": str(timedelta(seconds=int(video.duration)))}
    parts: list[dict[str, Any]] = []
    text = texts.intro.format(**about)
    for number, seconds in enumerate(video.seconds, 1):
        minutes, rest = divmod(int(seconds), 60)
        own = {"number": number, "seconds": seconds, "timestamp": f"{minutes:02d}:{rest:02d}"}
        text += (texts.between if number > 1 else "") + texts.before.format(**own)
        parts += [{"type": "text", "text": text}, {"type": "image"}]
        text = ""
    return [*parts, {"type": "text", "text": texts.outro}] if texts.outro else parts


_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_SMALL = _NUMBERS.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """A number from 0 to 999 in English words, as the package num2words writes it; others as digits."""
    if not 0 <= number < 1000:
        return str(number)
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return f"{tens}-{_SMALL[number % 10]}" if number % 10 else tens
    hundreds = f"{_SMALL[number // 100]} hundred"
    return f"{hundreds} and {in_words(number % 100)}" if number % 100 else hundreds
