"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("harness", "resume_scenarios")

from harness import build_once, end_all  # noqa: E402
from resume_scenarios import Reference, References, make_reference  # noqa: E402


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed reference run of a recipe, made at first use, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "reference"

    def find(recipe: str) -> Reference:
        home = build_once(shared / recipe, lambda folder: make_reference(folder, recipe))
        return Reference(home, home / "runs" / recipe)

    return find


@pytest.fixture(autouse=True)
def no_run_continues() -> Iterator[None]:
    yield
    end_all()
