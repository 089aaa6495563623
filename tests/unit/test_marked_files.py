"""Files are left out of a collection only where no test of them could be taken."""

from pathlib import Path

import pytest

from marked_files import MarkedFiles

FILES = {
    "test_plain": "def test_a(): pass\n",
    "test_words": "'slow, ray, deepspeed'\n",
    "test_some": "import pytest\n@pytest.mark.slow\ndef test_b(): pass\n",
    "needed": "import pytest\nneeds_ray = [pytest.mark.ray]\n",
    "test_imports": "from needed import needs_ray\npytestmark = needs_ray\n",
    "test_further": "from sub.test_imports import pytestmark\n",
}


@pytest.mark.parametrize(
    ("expression", "taken"),
    [
        ("slow", {"test_some"}),
        ("not slow", set(FILES)),
        ("ray", {"needed", "test_imports", "test_further"}),
        ("(ray or vllm) and not slow", {"needed", "test_imports", "test_further"}),
        ("slow and not ray", {"test_some"}),
        ("slow and ray", set()),
        ("slow and", set(FILES)),
    ],
)
def test_a_file_is_left_out_only_where_no_test_can_have_the_marks(
    expression: str, taken: set[str], tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = MarkedFiles(tmp_path)
    assert {name for name in FILES if files.may_take(expression, tmp_path / f"{name}.py")} == taken
