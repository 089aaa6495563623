"""The page of all fields is the one the code makes."""

from pathlib import Path

from lockstep.config.load import RECIPES
from lockstep.config.reference import reference
from lockstep.config.spelling import leaves

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: python -m lockstep.config.reference > docs/config.md"


def test_every_field_is_on_it() -> None:
    text = reference()
    for model in RECIPES.values():
        for path in leaves(model):
            assert f"`{path.rsplit('.', 1)[-1]}`" in text
