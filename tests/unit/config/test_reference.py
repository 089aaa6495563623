"""The reference page matches the config models."""

from pathlib import Path

from lockstep.config.loader import RECIPES, dotted_keys
from lockstep.config.reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: python -m lockstep.config.reference > docs/config.md"


def test_every_field_is_listed() -> None:
    text = reference()
    for model in RECIPES.values():
        for path in dotted_keys(model):
            assert f"`{path.rsplit('.', 1)[-1]}`" in text
