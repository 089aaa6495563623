"""The house stays guessable: one name for one thing, folders that fit a screen, plain words."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
SOURCES = sorted(PACKAGE.rglob("*.py"))

REPEATED_STEMS = {"__init__", "__main__", "errors", "protocol"}
"""Every room may have one of these."""
SIBLINGS = (PACKAGE / "rollout",)
"""Their folders implement one protocol, each for another backend, in files of the same names."""
PAYLOAD = PACKAGE / "watch" / "attach" / "payload"
"""No package: the folder that `lockstep watch` puts on the path of the jobs that it watches."""
MOST_FILES = 20
MOST_LINES = 420
MOST_BODY_LINES = 50
"""Of a function, without its signature (a command's declares its options) and its docstring."""

PRIVATE_WORDS = re.compile(
    r"\b((?<![\"`])whom(?![\"`])|goes on|go on with|went on|is told|are told|was told|nobody is|said hello"
    r"|the same eyes|is meant\?)\b",
    re.IGNORECASE,
)
"""Phrases of the private language that this code once spoke."""


def folders() -> Iterator[Path]:
    yield from sorted({path.parent for path in SOURCES})


def test_a_file_stem_means_one_thing() -> None:
    places = defaultdict(set)
    for path in SOURCES:
        if path.stem not in REPEATED_STEMS:
            family = next((room for room in SIBLINGS if room in path.parents and path.parent != room), None)
            places[path.stem].add(family or path)
    assert {stem: sorted(map(str, found)) for stem, found in places.items() if len(found) > 1} == {}


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_fits_a_screen(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES, "divide it by concept"


def test_no_file_is_longer_than_one_idea() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's statements, from the first to the last one."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{path.relative_to(PACKAGE)}: {node.name}": body_lines(node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_BODY_LINES} == {}


def test_sources_and_docs_speak_plain_english() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in [*SOURCES, *pages]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := PRIVATE_WORDS.search(line))
    ]
    assert found == []


_COUNTED = re.compile(r"\{(?!count_noun)[^{}]+\} (?:terms|steps|prompts|weights|variables|rewards)\b")
_NEVER_ONE = (
    "{prompts} prompts x", "{train} prompts x", "{prompts:,} prompts, {group} each", "checkpoints after {known} steps",
    "map(str, steps))} steps",
)  # fmt: skip
"""Lists, and numbers that are multiplied, of which a singular would look odd."""


def test_counts_agree_with_their_nouns() -> None:
    """`1 terms`: a number before a noun is formatted with `base.text.count_noun`."""
    found = [
        f"{file.relative_to(PACKAGE)}: {line.strip()}"
        for file in SOURCES
        for line in file.read_text().splitlines()
        if _COUNTED.search(line) and not any(each in line for each in _NEVER_ONE)
    ]
    assert found == []


def test_every_room_says_what_it_is_for() -> None:
    silent = [
        str(folder.relative_to(PACKAGE))
        for folder in folders()
        if folder != PAYLOAD and not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]
    assert silent == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them without their folders."""
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem not in ("__init__", "conftest")]
    repeated = sorted({name for name in names if names.count(name) > 1} - {"sitecustomize"})
    assert repeated == []


def test_the_architecture_page_names_files_and_rooms_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `([\w/]+)` \|", page, re.MULTILINE)
    missing = [name for name in rooms if not (PACKAGE / name / "__init__.py").is_file()]
    missing += [name for name in re.findall(r"`([\w/]+\.py)`", page) if not (PACKAGE / name).is_file()]
    assert missing == []
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} <= set(rooms)
