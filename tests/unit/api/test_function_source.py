"""Functions of the main module are copied with what they need, or refused with the reason."""

import linecache
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.function_source import MAIN, FunctionNotCarried, SourceModule, importable_path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs a text as a cell of a notebook, whose main module it defines."""
    module = type(sys)(MAIN)
    monkeypatch.setitem(sys.modules, MAIN, module)
    cells: list[str] = []

    def run(text: str) -> dict[str, Any]:
        text = textwrap.dedent(text)
        name = f"<cell {len(cells)}>"
        cells.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(module))
        return vars(module)

    yield run
    for name in cells:
        linecache.cache.pop(name, None)


def copied(function: Callable[..., Any], tmp_path: Path) -> dict[str, Any]:
    """The module with a copy of the function, as another process imports it."""
    module = SourceModule()
    module.add(function)
    file = tmp_path / "rewards.py"
    file.write_text(module.text())
    names: dict[str, Any] = {"__name__": "rewards"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names


def test_a_function_brings_helpers_imports_and_constants(main: Any, tmp_path: Path) -> None:
    main("""
        import os.path as paths
        import re
        from math import sqrt
        from pathlib import Path

        WORDS = {"yes": 1.0, "no": [0.0, None]}
        PATTERN = re.compile("[a-z]+", re.IGNORECASE)
        PLACE = Path("/tmp")
    """)
    names = main("""
        def doubled(value: float, by: float = sqrt(4.0)) -> float:
            return value * by

        class Rule:
            words = WORDS

            def score(self, text):
                found = PATTERN.match(text)
                return doubled(self.words.get(found[0], 0.0)) if found else -1.0

        def score(completions, **columns):
            def one(text):
                return Rule().score(text)
            return [one(each) for each in completions] + [len(paths.join(str(PLACE), "a"))]
    """)
    copy = copied(names["score"], tmp_path)
    assert copy["score"](["yes", "maybe", "?"]) == [2.0, 0.0, -1.0, 6]


def test_a_recursive_function_and_one_that_is_defined_again(main: Any, tmp_path: Path) -> None:
    main("def score(completions):\n    return 'old'\n")
    names = main("""
        def even(n):
            return n == 0 or odd(n - 1)

        def odd(n):
            return n > 0 and even(n - 1)

        def score(completions):
            return [float(even(len(each))) for each in completions]
    """)
    assert copied(names["score"], tmp_path)["score"](["ab", "a"]) == [1.0, 0.0]


def test_constants_of_the_function_around_are_carried(main: Any, tmp_path: Path) -> None:
    names = main("""
        def make(bonus):
            def score(completions):
                return [bonus for _ in completions]
            return score

        made = make(0.5)
    """)
    assert copied(names["made"], tmp_path)["score"]("ab") == [0.5, 0.5]


def test_a_module_beside_the_script_is_found(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("def one(text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = main(
        "import beside_it\n\ndef score(completions):\n    return [beside_it.one(each) for each in completions]\n"
    )
    module = SourceModule()
    module.add(names["score"])
    file = tmp_path / "run" / "rewards.py"
    file.parent.mkdir()
    file.write_text(module.text())
    command = "import runpy; print(runpy.run_path('run/rewards.py')['score'](['a']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1.0]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("score = lambda completions: [0.0]", "a lambda has no name"),
        ("pick = lambda text: 0.0\ndef score(completions):\n    return [pick('')]", "uses a lambda"),
        ("model = object()\ndef score(completions):\n    return [model]", "uses 'model', which is object"),
        ("values = [float('nan')]\ndef score(completions):\n    return values", "uses 'values', which is list"),
        ("def score(completions):\n    return later(completions)", "uses 'later', which is not defined"),
        ("big = 'x' * 2**20\ndef score(completions):\n    return big", "'big' is larger than 1 MiB"),
        ("score = len", "it is builtin_function_or_method, and only functions"),
        ("import functools\ndef f(a, completions): pass\nscore = functools.partial(f, 1)", "it is partial"),
        ("class Score:\n    def __call__(self, completions): pass\nscore = Score()", "Score: it is Score"),
        (
            "def double(f):\n    def score(completions):\n        return f(completions)\n    return score\n"
            "@double\ndef score(completions):\n    return [1.0]\n",
            "is decorated, and the decorator returns another function",
        ),
        ("x = 1; score = None\ndef score(completions): return [x]; y = 2", None),
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused(main: Any, tmp_path: Path, text: str, problem: str | None) -> None:
    function = main(text)["score"]
    if problem is None:
        assert copied(function, tmp_path)["score"]([]) == [1]
        return
    with pytest.raises(FunctionNotCarried, match=re.escape(problem)) as caught:
        copied(function, tmp_path)
    assert "reward function " in str(caught.value) and caught.value.remedy


def test_a_source_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a program that is read from standard input."""
    module = type(sys)(MAIN)
    monkeypatch.setitem(sys.modules, MAIN, module)
    exec(compile("def score(completions):\n    return [0.0]\n", "<stdin>", "exec"), vars(module))
    with pytest.raises(FunctionNotCarried, match=r"source of score is not available.*put the function into a file.py"):
        SourceModule().add(vars(module)["score"])


def test_one_name_for_two_things_is_refused(main: Any) -> None:
    names = main("""
        def make(bonus):
            def score(completions):
                return [bonus for _ in completions]
            return score

        first, second = make(0.5), make(1.5)
    """)
    module = SourceModule()
    module.add(names["first"])
    with pytest.raises(FunctionNotCarried, match="'score' stands for two different things"):
        module.add(names["second"])


def importable(text: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    monkeypatch.syspath_prepend(folder)
    return __import__(name, fromlist=["score"]).score


def test_functions_of_modules_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def score(completions):\n    return [0.0]\n"
    alone = importable(text, "module_alone", tmp_path, monkeypatch)
    assert importable_path(alone) == f"{tmp_path / 'module_alone.py'}:score"
    monkeypatch.chdir(tmp_path)
    assert importable_path(alone) == "module_alone.py:score"
    inner = importable(text, "its_package.rewards", tmp_path, monkeypatch)
    assert importable_path(inner) == "its_package.rewards:score"
    assert importable_path(textwrap.dedent) == "textwrap:dedent"
    monkeypatch.chdir("/")
    with pytest.raises(FunctionNotCarried, match="package its_package is neither installed nor in the current folder"):
        importable_path(inner)


def test_a_function_inside_a_function_of_a_module_is_refused() -> None:
    def score(completions: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(FunctionNotCarried, match="has no such name"):
        importable_path(score)
