"""The documentation is correct: its commands run, its YAML loads, its Python is from the examples, its links have
targets."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_controller import Forked
from typer.testing import CliRunner

import lockstep
from lockstep.cli import app, load_command
from lockstep.config.loader import apply_overrides, check_config, load_config
from lockstep.models.tiny_model import TinyModel

pytestmark = [pytest.mark.xdist_group("readme"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [block for block in found if block.language == language]


def commands(block: Block) -> list[str]:
    """Lines of a bash block, without comments."""
    words = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    return [shlex.join(each) for each in words if each]


def test_every_fenced_block_is_of_a_kind_that_is_tested() -> None:
    """Here, or for `text`, the output of an example, in the test of that example."""
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= {"bash", "yaml", "python", "text"} and set(fences[1::2]) <= {""}, page


# ---------------------------------------------------------------- YAML and Python

BASE: dict[str, Any] = {
    "recipe": "grpo",
    "name": "x",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "reward": {"terms": [{"kind": "exact_match"}]},
}
"""Completes blocks that show only a section of a config."""


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_loads(block: Block) -> None:
    values = yaml.safe_load(block.text)
    check_config(values if "recipe" in values else BASE | values, str(block))


NOTEBOOK = ROOT / "examples" / "python_api.ipynb"
WITHOUT_CALLBACK = ", on_step=watch"
"""The README shows the notebook's call without it."""


def cells() -> list[str]:
    """The code of the notebook, which test_notebook.py executes."""
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_is_from_the_examples(block: Block) -> None:
    """Functions and classes of the examples, and whatever is in the notebook."""
    examples = {
        ast.unparse(node)
        for file in (ROOT / "examples").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    executed = {ast.unparse(node) for cell in cells() for node in ast.parse(cell).body}
    examples |= executed | {each.replace(WITHOUT_CALLBACK, "") for each in executed}
    shown = ast.parse(block.text).body
    assert shown and all(ast.unparse(node) in examples for node in shown)


def test_the_yaml_in_the_examples_docstring_loads() -> None:
    text = ast.get_docstring(ast.parse((ROOT / "examples" / "rewards.py").read_text()))
    assert text is not None
    check_config(BASE | yaml.safe_load(text[text.index("reward:") :]), "rewards.py")


# ---------------------------------------------------------------- commands

SHORT = ["steps=2", "trainer.threads=1", "rollout.engine.threads=1", "data.limit=64", "evaluation.prompts=8"]
OVERRIDES = {
    "lockstep train examples/sft_sort.yaml": [*SHORT, "batch_size=16"],
    **{
        f"lockstep train examples/{name}_sort.yaml": [*SHORT, "batch_size=8", "trainer.schedule.warmup_steps=1"]
        for name in ("dpo", "kto", "orpo")
    },
    "lockstep train examples/reward_sort.yaml": [
        "steps=2",
        "trainer.threads=1",
        "data.limit=64",
        "batch_size=8",
        "trainer.schedule.warmup_steps=1",
    ],
    "lockstep train examples/grpo_reward_model.yaml": [
        *SHORT,
        "prompts_per_step=4",
        "trainer.schedule.warmup_steps=1",
    ],
    **{
        f"lockstep train examples/{name}.yaml": [
            *SHORT,
            "prompts_per_step=4",
            "trainer.schedule.warmup_steps=1",
            "critic.warmup_steps=1",
            "critic.trainer.threads=1",
        ]
        for name in ("ppo_sort", "ppo_reward_model")
    },
    **{
        f"lockstep train examples/{name}_sort.yaml": [*SHORT, "prompts_per_step=4", "trainer.schedule.warmup_steps=1"]
        for name in ("online_dpo", "rejection_sampling")
    },
    "lockstep train examples/grpo_sort.yaml": [*SHORT, "prompts_per_step=4", "trainer.schedule.warmup_steps=1"],
}
"""Overrides that are appended to documented commands that take minutes."""
NOT_RUN = {
    "script/bootstrap": "makes a virtual environment; everything here runs in the one it made",
    "script/demo": "takes minutes; it is compared with what is documented",
    "script/test": "runs this test",
    "script/benchmark": "takes twenty minutes; tests/unit/benchmarks runs it small",
    "script/gpu": "needs a GPU; tests/unit/benchmarks runs it dry",
    ".venv/bin/pre-commit install": "changes the git hooks",
}


WATCHED = ("watch-command.md",)
"""Pages whose command is run by tests/faults/test_watch_command.py, because it ends with a stall."""
CHECKS = ("check.md",)
"""Pages whose commands check the host: their exit code is 1 if the host that runs the tests has a problem."""
EXAMPLES = ("environments.md", "tasks.md", "vision.md")
"""Pages whose commands are tested with dry runs here; test_examples_learn.py makes the runs."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without build results."""
    copy = tmp_path_factory.mktemp("readme") / "lockstep"
    copy.mkdir()
    for name in ("examples", "script", "README.md", "pyproject.toml"):
        source = ROOT / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
    (copy / ".venv").symlink_to(Path(sys.executable).parents[1])
    return copy


def environment() -> dict[str, str]:
    """The environment of a user's shell: `lockstep` is only found after the documented `source`."""
    bin = str(Path(sys.executable).parent)
    path = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != bin)
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


README = ROOT / "README.md"
NOT_STARTED = ("CONTRIBUTING.md", *EXAMPLES, *WATCHED, *CHECKS)
"""Pages about the checkout itself (NOT_RUN), or tested below."""
OTHER_PAGES = [
    page
    for page in PAGES
    if page != README
    and page.name not in NOT_STARTED
    and any(
        command.startswith("lockstep ") for block in blocks("bash") if block.page == page for command in commands(block)
    )
]

IN_LONG_SUITES = ("online.md", "preference.md", "reward-models.md")
"""Pages with eight of nine trainings. What they train is trained elsewhere in the quick tests."""


def page_commands(page: Path) -> Iterator[tuple[Block, str]]:
    """The commands of a page that are run, with their blocks."""
    for block in blocks("bash"):
        if block.page == page:
            yield from ((block, command) for command in commands(block) if command.split()[0] not in NOT_RUN)


def short(command: str) -> list[str]:
    """The words of a command, with the overrides that make it quick."""
    return [*shlex.split(command), *OVERRIDES.get(command.removesuffix(" --dry-run"), [])]


@pytest.fixture(scope="module")
def readme_outputs(copy: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """What each command of the README printed, in their order; the models and runs are in `copy`. They run in a shell,
    but for the trainings after the first: those are forked from a process that has imported torch already."""
    sourced, ran = "", dict[str, subprocess.CompletedProcess[str]]()
    for number, (block, command) in enumerate(page_commands(README)):
        if command.startswith("source "):
            sourced += f"{command}; "
            continue
        words = short(command)
        if any(each.startswith("lockstep train ") for each in ran) and words[:2] == ["lockstep", "train"]:
            output = copy.parent / f"readme-{number}.out"
            code = Forked(words[1:], output, copy).wait(300)
            done = subprocess.CompletedProcess(words, code, stdout="", stderr=output.read_text())
        else:
            done = subprocess.run(
                ["bash", "-c", f"set -eu; {sourced}{shlex.join(words)}"],
                cwd=copy, env=environment(), capture_output=True, text=True, timeout=300,
            )  # fmt: skip
        is_host_problem = (
            command.startswith("lockstep check") and done.returncode == 1
        )  # of the host that runs the tests
        assert done.returncode == 0 or is_host_problem, f"{block}: {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr and "it/s]" not in done.stderr, done.stderr
        ran[command] = done
    return ran


def test_the_commands_of_the_readme_run_in_their_order(
    readme_outputs: dict[str, "subprocess.CompletedProcess[str]"], copy: Path
) -> None:
    assert [command.split()[1] for command in readme_outputs if command.startswith("lockstep")] == [
        *("tiny", "check", "train", "train", "train", "top", "train"),
    ]
    assert (copy / "runs/sort-grpo/export/model.safetensors").is_file()
    (resumed,) = (done.stderr for command, done in readme_outputs.items() if "--resume" in command)
    assert "finished after 2 of 2" not in resumed and "is finished: 2 of 2 steps" in resumed


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name in IN_LONG_SUITES else ()) for page in OTHER_PAGES],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page_run_after_those_of_the_readme(
    page: Path, readme_outputs: dict[str, "subprocess.CompletedProcess[str]"], copy: Path
) -> None:
    """In processes that are forked from one that has imported torch already."""
    for number, (block, command) in enumerate(page_commands(page)):
        program, *arguments = short(command)
        assert program == "lockstep", f"{block}: {command}"
        output = copy.parent / f"{page.stem}-{number}.out"
        code = Forked(arguments, output, copy).wait(300)
        printed = output.read_text()
        assert code == 0, f"{block}: {command}\n{printed}"
        assert "Traceback" not in printed and "it/s]" not in printed, printed


def test_the_documented_commands_are_these() -> None:
    assert [command.split()[1] for page in OTHER_PAGES for _, command in page_commands(page)] == [
        *("convert", *9 * ["train"], "generate", "eval", "export", "push"),
    ]


@pytest.mark.parametrize("command", [c for b in blocks("bash") if b.page.name in CHECKS for c in commands(b)])
def test_the_commands_that_check_a_host_end_as_documented(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout) if "--json" in command else None
    assert report is None or report["passed"] is (result.exit_code == 0)


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_commands_of_an_example_build_on_each_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "tasks.md":
        pytest.importorskip("reasoning_gym")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    found = [command for block in blocks("bash") if block.page.name == page for command in commands(block)]
    models: list[str] = []
    for program, *arguments in map(shlex.split, found):
        if program == "python":
            subprocess.run([sys.executable, *arguments], check=True, timeout=60)
            continue
        if arguments[0] == "train":
            values = load_config(Path(arguments[1]))
            exported = f"{values.folder}/{values.name}/export"
            assert values.model.path in models, "made by an earlier command"
            arguments += ["--dry-run", f"model.path={models[0]}"]
            models.append(exported)
        else:
            models.append(arguments[1])
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", sorted({c for block in blocks("bash") for c in commands(block)}))
def test_files_and_options_in_commands_exist(command: str) -> None:
    """Files, subcommands and options."""
    program, *arguments = shlex.split(command)
    if program in ("lockstep", "source"):
        return  # run above
    if program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
        return
    if program == "python":
        program = arguments[0]
    if program == ".venv/bin/pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
        return
    assert (ROOT / program).is_file()
    for argument in arguments:
        if program == "script/test":
            known = argument in (ROOT / program).read_text() if argument.startswith("-") else (ROOT / argument).exists()
            assert known, argument


@pytest.mark.parametrize("script", sorted((ROOT / "script").iterdir()), ids=lambda path: path.name)
def test_scripts_are_executable_and_valid(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


def inline() -> list[tuple[str, str]]:
    """(page, command) of every `lockstep ...` within text."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", text):
            words = " ".join(code.split())
            if re.match(r"lockstep [a-z]", words):
                found.append((page.name, words))
    return found


@pytest.mark.parametrize(("page", "command"), inline())
def test_commands_within_sentences_exist(page: str, command: str) -> None:
    _, name, *arguments = shlex.split(command)
    known = load_command(name)
    options = {option for parameter in known.params for option in parameter.opts} | {"--"}
    assert {argument for argument in arguments if argument.startswith("-")} <= options
    files = [argument for argument in arguments if argument.endswith(".yaml") and argument.islower()]
    overrides = [argument for argument in arguments if "=" in argument]
    for file in files:
        load_config(ROOT / file, overrides)
    if overrides and not files:
        check_config(apply_overrides(BASE, overrides), page)


STUB = """#!/usr/bin/env python3
import json, pathlib, sys
with (pathlib.Path(__file__).parents[2] / "called").open("a") as file:
    file.write(json.dumps([pathlib.Path(__file__).name, *sys.argv[1:]]) + "\\n")
"""


def demo(copy: Path, *arguments: str) -> list[list[str]]:
    """The commands that script/demo calls, recorded by substitutes for its programs."""
    (copy / ".venv" / "bin").mkdir(parents=True)
    shutil.copytree(ROOT / "script", copy / "script")
    for name in (".venv/bin/lockstep", ".venv/bin/python", "script/bootstrap"):
        (copy / name).write_text(STUB)
        (copy / name).chmod(0o755)
    subprocess.run([copy / "script" / "demo", *arguments], check=True, capture_output=True, timeout=60)
    called = [json.loads(line) for line in (copy / "called").read_text().splitlines()]
    return [words for words in called if words[0] == "lockstep" or words[1:2] != ["-"]]


def options(words: list[str]) -> dict[str, Any]:
    """The options of a `lockstep tiny` command."""
    given = dict(zip(words[3::2], words[4::2], strict=True))
    fields = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    return {name: int(value) if name != "alphabet" else value for name, value in fields.items()}


def test_the_demo_does_what_is_documented(tmp_path: Path) -> None:
    """The demo runs the documented commands in the same order; only folders and the seed of the initial weights
    differ."""
    documented = [shlex.split(c) for block in blocks("bash") if block.page.name == "README.md" for c in commands(block)]
    tiny, data, *trained = demo(tmp_path)
    (shown,) = (words for words in documented if words[:2] == ["lockstep", "tiny"])
    assert TinyModel(**options(tiny) | {"seed": 0}) == TinyModel(**options(shown))
    assert data[:2] in [words[:2] for words in documented]
    documented_runs = [words for words in documented if words[:2] == ["lockstep", "train"] and len(words) == 3]
    assert [words[:3] for words in trained] == documented_runs
    for words in trained:
        changed = {word.partition("=")[0] for word in words[3:]}
        assert changed <= {"folder", "model.path", "data.path", "evaluation.data.path"}


def test_the_demo_with_faults_disturbs_the_same_run(tmp_path: Path) -> None:
    *before, trained = demo(tmp_path / "plain", "folder", "seed=3")
    *before_too, broken = demo(tmp_path / "fault", "--fault", "folder", "seed=3")
    assert before_too == before
    assert broken == ["python", "examples/faults.py", "folder/sort-grpo", "--", ".venv/bin/lockstep", *trained[1:]]


# ---------------------------------------------------------------- links, paths, names


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert "://" not in target, f"{target}: pages link to pages only"
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_file() and found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in PAGES if page.parent.name == "docs"} <= linked


OURS = [page for page in PAGES if page.name not in ("failures.md", "environment-lint.md")]
"""All pages except those that show logs and settings of other programs, with addresses and paths."""


@pytest.mark.parametrize("page", [*OURS, *sorted((ROOT / "examples").glob("*.*"))], ids=lambda page: page.name)
def test_paths_are_relative_to_the_checkout(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|data|opt)\b", text)
    for_documentation = r"127\.0\.0\.1\b|192\.0\.2\."
    assert not re.search(rf"\b(?!{for_documentation})(\d{{1,3}}\.){{3}}\d{{1,3}}\b|@[a-z]+\.[a-z]{{2,}}", text)
    for path in re.findall(r"`((?:src|tests|examples|script|docs|benchmarks)(?:/[\w.-]+)+/?)`", text):
        assert (ROOT / path).exists(), path


def test_named_modules_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(lockstep(?:\.\w+)+)`", page.read_text()):
            if name.removeprefix("lockstep.") in dir(lockstep):
                continue  # what `import lockstep` offers
            base = ROOT / "src" / Path(*name.split("."))
            assert base.is_dir() or base.with_suffix(".py").is_file(), f"{page.name}: {name}"


def without_other_frameworks(text: str) -> str:
    """The text of a page without the columns of tables that have the name of another framework."""
    kept, others = [], set()
    for line, above in zip(text.splitlines(), ["", *text.splitlines()], strict=False):
        cells = line.split("|") if line.startswith("|") else [line]
        if not above.startswith("|"):
            others = {place for place, cell in enumerate(cells) if cell.strip() in ("OpenRLHF", "verl", "TRL")}
        kept.append("|".join(cell for place, cell in enumerate(cells) if place not in others))
    return "\n".join(kept)


def test_named_fields_exist() -> None:
    """`section.key` in the pages is a field of the config."""
    from lockstep.config.loader import dotted_keys
    from lockstep.config.recipes import RECIPES

    known = {key for config in RECIPES.values() for key in dotted_keys(config)}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for page in PAGES:
        text = without_other_frameworks(page.read_text())
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*|: [a-z]+)?`", text):
            head, tail = name.partition(".")[0], name.rpartition(".")[2]
            if head in sections and tail not in ("py", "yaml", "jsonl", "md", "html", "json", "toml", "ground_truth"):
                assert name in known, f"{page.name}: {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.startswith("from-")], ids=lambda page: page.stem)
def test_fields_in_the_tables_for_other_frameworks_exist(page: Path) -> None:
    """The second column of the tables names fields of the config, dotted or at the top."""
    from lockstep.config.loader import dotted_keys
    from lockstep.config.recipes import RECIPES

    known = {key for config in RECIPES.values() for key in dotted_keys(config)}
    rows = re.findall(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", page.read_text(), re.MULTILINE)
    named = [name for _, ours, _ in rows for name in re.findall(r"`([a-z_.]+)(?:: [^`]*)?`", ours)]
    assert len(rows) > 30 and len(named) > 30
    assert set(named) <= known, set(named) - known


def test_exit_codes_are_documented() -> None:
    from lockstep.cli import terminal

    text = (ROOT / "docs" / "run-folder.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {0, terminal.FAILED, terminal.REFUSED, terminal.INTERRUPTED}


def test_the_readmes_claim_about_a_misspelt_key() -> None:
    result = CliRunner().invoke(app, ["train", str(ROOT / "examples" / "grpo_sort.yaml"), "stepps=3"])
    assert result.exit_code == 2 and "did you mean 'steps'?" in result.stderr
