"""What environments return, as it leaves their process."""

import io
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from lockstep.rollout.environments.environment_protocol import (
    BadObservation,
    Observation,
    ObservationLimits,
    to_observation,
)
from lockstep.rollout.environments.environment_service import observation_digest

LIMITS = ObservationLimits(images=2, max_pixels=10_000)


def picture(grey: int = 90) -> Image.Image:
    return Image.new("RGB", (8, 6), (grey, grey, grey))


def test_images_leave_the_process_as_bytes_in_parts(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    limits = ObservationLimits(tmp_path, images=2)
    found = to_observation(Observation("see <image> there", images=["a.png"], reward=1), "step", limits)
    assert found.text is None and found.images == []
    before, image, after = found.messages[0]["content"]
    assert (before["text"], after["text"]) == ("see ", " there")
    assert image == {"type": "image", "bytes": (tmp_path / "a.png").read_bytes()}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Observation) == found
    alone = to_observation(Observation(images=[picture()]), "step", LIMITS)
    assert next(part["type"] for part in alone.messages[0]["content"]) == "image"


def test_another_picture_is_another_observation() -> None:
    one, other, again = (to_observation(Observation(images=[picture(g)]), "step", LIMITS) for g in (90, 91, 90))
    assert observation_digest(one) == observation_digest(again) != observation_digest(other)


def test_answers_without_images_are_left_as_they_are() -> None:
    parts = [{"type": "text", "text": "an <image>"}]
    for value in (Observation("an <image>"), Observation(messages=[{"role": "user", "content": parts}])):
        before = msgspec.to_builtins(value)
        assert msgspec.to_builtins(to_observation(value, "step", ObservationLimits())) == before


@pytest.mark.parametrize(
    "value, problem",
    [
        (Observation(images=[picture()] * 3), "step returned 3 images, and rollout.environment.max_images is 2"),
        (Observation("<image><image>", images=[picture()]), "step: .*2 markers <image> and the row has 1 image"),
        (Observation(images=[Image.new("L", (200, 200))]), "step: image 'image 0' has 200 x 200 pixels, more than"),
        (Observation(messages=[{"role": "user", "content": [{"type": "video"}]}]), "step: .*'video'"),
        (Observation(images=[7]), "step: image 'image 0' is int"),
    ],
)
def test_images_that_cannot_be_used_are_named(value: Observation, problem: str) -> None:
    with pytest.raises(BadObservation, match=problem):
        to_observation(value, "step", LIMITS)


def test_images_of_the_last_answer_are_not_sent() -> None:
    file = io.BytesIO()
    picture().save(file, "PNG")
    found = to_observation(Observation("end", images=[file.getvalue()], done=True), "step", ObservationLimits())
    assert found.images == [] and found.text == "end"
