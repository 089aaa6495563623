"""Settings of images: what is refused, and how folders may be written."""

import pytest
from pydantic import ValidationError

from lockstep.config.vision import ImageDataConfig, VisionConfig


def test_everything_is_trained_by_default() -> None:
    assert VisionConfig().trains_all
    assert not VisionConfig.model_validate({"tower": {"train": False}}).trains_all


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels 9 is more than max_pixels 8"),
        ({"tower": {"train": False, "lr": 1e-5}}, "a part that is not trained has no learning rate"),
        ({part: {"train": False} for part in ("tower", "projector", "language")}, "all frozen"),
    ],
)
def test_contradictions_are_refused(values: dict, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        VisionConfig.model_validate(values)


@pytest.mark.parametrize("folder", ["/a:/b", ["/a", "/b"], "/a:/b:"])
def test_folders_are_a_list_or_separated_by_colons(folder: object) -> None:
    assert ImageDataConfig.model_validate({"folder": folder}).folders == ("/a", "/b")
    assert ImageDataConfig().folders == ()
