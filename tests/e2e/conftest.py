"""What the end-to-end tests share."""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("harness", "resume_scenarios")

from harness import end_all, once  # noqa: E402
from resume_scenarios import Reference, References, make_reference  # noqa: E402


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference run of a recipe: nothing disturbs it. Made at first use, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "reference"

    def find(recipe: str) -> Reference:
        home = once(shared / recipe, lambda folder: make_reference(folder, recipe))
        return Reference(home, home / "runs" / recipe)

    return find


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    yield
    end_all()
