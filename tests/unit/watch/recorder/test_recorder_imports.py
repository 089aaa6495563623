"""The code that is loaded into jobs of other frameworks needs the standard library only, and runs on Python 3.10."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parents[1]
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import lockstep.watch.attach.enroll
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("lockstep")]
ours = {"__main__", "lockstep"}
names = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - ours)
print(json.dumps([files, names]))
"""


@pytest.fixture(scope="module")
def loaded() -> list[list[str]]:
    """The files and top-level modules that `import lockstep.watch.attach.enroll` loads in an interpreter without
    site-packages."""
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM, str(SOURCE)],
        capture_output=True, text=True, timeout=60, check=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    found: list[list[str]] = json.loads(process.stdout)
    return found


def test_it_needs_the_standard_library_only(loaded: list[list[str]]) -> None:
    files, others = loaded
    assert others == []
    assert any(each.endswith("watch/recorder/wrappers.py") for each in files)


def test_it_is_written_for_python_3_10(loaded: list[list[str]]) -> None:
    for each in loaded[0]:
        ast.parse(Path(each).read_text(), each, feature_version=(3, 10))
        assert "Unpack" not in Path(each).read_text() and "StrEnum" not in Path(each).read_text(), each
