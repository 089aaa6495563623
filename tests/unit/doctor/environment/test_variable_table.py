"""The schema of the data files, and each of their statements."""

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.doctor.environment.environment_lint import JobTraits, ProcessEnvironment, lint_environments
from lockstep.doctor.environment.variable_table import (
    BadVariableData,
    EnvironmentVariable,
    ValueCondition,
    load_variables,
    version_numbers,
    version_reached,
)
from lockstep.doctor.environment.variable_values import edit_distance, nearest_name, value_matches, value_problem

TABLE = load_variables()
KNOWN = [each.variable for each in TABLE.known.values()]
READ = [each for each in KNOWN if each.readers and each.until is None]


EXAMPLES = {
    "lo": "~=?lo",
    "mlx5_0,mlx5_1": r"~(?!\^?=).*\bmlx5_[1-9](?!\d).*",
    "br-0a1b2c3d4e5f": r"~=?(docker\d*|br-[0-9a-f]{12}|virbr\d*)",
    "docker0": r"~docker\d*|br-[0-9a-f]{12}|virbr\d*",
    "^docker0,lo": r"~[\^=].*|.*[*?].*",
    "eth*": r"~[^,]*[*?][^,]*",
    "0,0": r"~(?:[^,]*,)*?\s*([^,\s]+)\s*(?:,[^,]*)*?,\s*\1\s*(?:,.*)?",
    "expandable_segments:True": r"~.*expandable_segments\s*:\s*true.*",
    "PATH,HOME=/x": r"~(?!ALL\b)[A-Za-z_]\w*(=[^,]*)?(,.*)?",
}
"""A value for each regular expression in `when`."""


def an_example(when: ValueCondition) -> str:
    """Returns a value that meets a condition."""
    if isinstance(when, str) and when.startswith("~"):
        return next(value for value, pattern in EXAMPLES.items() if pattern == when)
    if not isinstance(when, str):
        return an_example(when[0])
    special = {"set": "x", "empty": "", "on": "1", "off": "0"}
    if when in special:
        return special[when]
    return str(int(float(when[1:])) + (1 if when[0] == ">" else -1)) if when[0] in "<>" else when


@pytest.mark.parametrize("variable", KNOWN, ids=lambda each: each.name)
def test_entries_are_consistent(variable: EnvironmentVariable) -> None:
    assert not value_problem(variable, variable.default) or not variable.default
    assert all(not value_problem(variable, value) for value in variable.values)
    if variable.renamed is not None:
        target = TABLE.known.get(variable.renamed)
        assert variable.renamed in TABLE.names and (target is None or target.variable.readers)
    for conflict in variable.conflicts:
        assert conflict.other in TABLE.names
        assert value_matches(an_example(conflict.when), conflict.when)
    for harm in variable.harmful_values:
        assert value_matches(an_example(harm.when), harm.when)
    assert variable.does.endswith((".", ")", "!"))
    for text in (
        variable.does,
        variable.use,
        variable.hurts,
        variable.bad,
        *(harm.why for harm in variable.harmful_values),
    ):
        assert text == text.strip() and "  " not in text


@pytest.mark.parametrize("variable", [each for each in READ if each.harmful_values], ids=lambda each: each.name)
def test_harmful_values_are_reported(variable: EnvironmentVariable) -> None:
    for harm in variable.harmful_values:
        job = JobTraits(multi_host=True, cuda=True, gpus=("NVIDIA GeForce RTX 4090",) if harm.gpus else ())
        findings = lint_environments([ProcessEnvironment("", {variable.name: an_example(harm.when)})], job=job)
        assert any(each.id == "env-left-on" and each.why == harm.why for each in findings)


@pytest.mark.parametrize("variable", [each for each in READ if each.conflicts], ids=lambda each: each.name)
def test_contradictions_are_reported(variable: EnvironmentVariable) -> None:
    for conflict in variable.conflicts:
        values = {variable.name: an_example(conflict.when), conflict.other: an_example(conflict.other_when)}
        findings = lint_environments([ProcessEnvironment("", values)])
        assert any(each.id == "env-conflict" and each.why == conflict.why for each in findings)


@pytest.mark.parametrize("variable", [each for each in KNOWN if not each.readers], ids=lambda each: each.name)
def test_unread_variables_are_reported_with_a_fix(variable: EnvironmentVariable) -> None:
    found = [
        each for each in lint_environments([ProcessEnvironment("", {variable.name: "1"})]) if each.id == "env-unread"
    ]
    assert len(found) == 1 and found[0].fix and found[0].source


def test_every_variable_has_a_source() -> None:
    assert all(each.sources for each in KNOWN)
    assert len(KNOWN) > 200 and len(TABLE.names) > 1500
    assert {each.library for each in TABLE.libraries} >= {
        "nccl", "torch", "gloo", "fabric", "cuda", "vllm", "ray", "deepspeed", "openrlhf", "verl", "hub", "lockstep",
    }  # fmt: skip
    pages = {source for each in KNOWN for source in each.sources if source.startswith("docs/")}
    assert all((Path(__file__).parents[4] / page).is_file() for page in pages)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("library: x\ntitle: X\nlisted_from: x\nvariables: [{name: A}]", "x.yaml: variables.A.readers"),
        (
            "library: x\ntitle: X\nlisted_from: x\n"
            "variables: [{name: A, readers: [x], does: d, sources: [https://a], huts: b}]",
            "x.yaml: variables.A.huts: Extra",
        ),
        (
            "library: x\ntitle: X\nlisted_from: x\nvariables: [{name: A, readers: [], does: d, sources: [https://a]}]",
            "variables.A: Value error, instead: nothing reads it",
        ),
        (
            "library: x\ntitle: X\nlisted_from: x\n"
            "variables: [{name: A, readers: [x], does: d, kind: choice, sources: [https://a]}]",
            "variables.A: Value error, values: missing",
        ),
        (
            "library: x\ntitle: X\nlisted_from: x\nvariables: [{name: A, readers: [x], does: d, sources: [no]}]",
            "sources",
        ),
        ("{", "x.yaml: not YAML"),
    ],
)
def test_the_error_about_an_invalid_file_names_file_and_key(text: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(BadVariableData) as refused:
        load_variables(tmp_path)
    assert place in str(refused.value)


def test_two_files_may_not_have_the_same_variable(tmp_path: Path) -> None:
    for name in ("x", "y"):
        text = f"library: {name}\ntitle: X\nlisted_from: x\nvariables: [{{name: A, readers: [x], does: d, sources: [https://a]}}]"
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(BadVariableData, match=r"y\.yaml: A: is also in x\.yaml"):
        load_variables(tmp_path)


def test_all_variables_of_lockstep_are_listed() -> None:
    source = Path(lockstep.__path__[0])
    texts = [file.read_text() for file in source.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(LOCKSTEP_[A-Z_]+)"', text)}
    assert named and named <= TABLE.names


def test_versions() -> None:
    assert (
        version_numbers("2.27.3+cuda12.2") == (2, 27, 3)
        and version_numbers("v1.2rc1") == (1, 2)
        and version_numbers("dev") == ()
    )
    assert version_reached("2.10", "2.9") and not version_reached("2.9.1", "2.10") and version_reached("2.9.0", "2.9")
    assert version_reached(None, "2.9") is None and version_reached("main", "2.9") is None


def test_misspelt_names() -> None:
    assert (
        edit_distance("abcd", "abdc", 2) == 1
        and edit_distance("abcd", "abcd", 2) == 0
        and edit_distance("abcd", "ab", 2) == 2
    )
    assert edit_distance("abcdefgh", "hgfedcba", 2) == 3
    assert nearest_name("NCCL_IB_TIMEOUTS", frozenset({"NCCL_IB_TIMEOUT", "NCCL_IB_TC"})) == "NCCL_IB_TIMEOUT"
    assert nearest_name("NCCL_FOO", frozenset({"NCCL_BAR"})) is None
