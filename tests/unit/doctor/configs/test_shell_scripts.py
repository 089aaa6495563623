"""Scripts are parsed as a shell parses them, and nothing in them is run."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.configs.config_settings import ConfigNotReadable
from lockstep.doctor.configs.shell_scripts import ShellCommand, ShellScript
from lockstep.doctor.configs.shell_words import UNSET, evaluate_arithmetic


def commands(text: str) -> list[ShellCommand]:
    return list(ShellScript(text, "x.sh").commands())


def words(text: str) -> list[str]:
    """The words of the last command."""
    return [word.text for word in commands(text)[-1].words]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\\\n  c # d\n", ["a", "b", "c"]),
        ("a 'b c'\"d e\"f\\ g", ["a", "b cd ef g"]),
        ("X=1; a $X ${X}2 \"$X 3\" '$X'", ["a", "1", "12", "1 3", "$X"]),
        ("X='b c'; a $X \"$X\"", ["a", "b", "c", "b c"]),
        ("a ${X:-b} ${X:-$Y} ${X:=c} $X", ["a", "b", UNSET, "c", "c"]),
        ("X=; a ${X:-b} ${X-b}c ${X:+d} ${Y:+d}", ["a", "b", "c"]),
        ("X=(1 'b c'\n 3 # no\n); X+=(4); a \"${X[@]}\" ${X[*]}", ["a", "1", "b c", "3", "4", "1", "b", "c", "3", "4"]),
        ("X=(); a \"${X[@]}\" b", ["a", "b"]),
        ("X=1; X+=2; a $X $((X * 3 + (2))) $(($X/0))", ["a", "12", "38", UNSET]),
        ("a $(rm -rf /) `touch x` $1 $@ b", ["a", UNSET, UNSET, UNSET, "b"]),
        ("a > out 2>&1 < in b >> log &", ["a", "b"]),
        ("if true; then a b; fi", ["a", "b"]),
        ("read -r -d '' X <<EOF\nb \\\n  c\nEOF\na $X", ["a", "b", "c"]),
        ("cat <<'EOF'\n$X\nEOF\na", ["a"]),
        ("X=1 Y=$X; export X; unset Y; a $X $Y", ["a", "1", UNSET]),
        ("a x#y", ["a", "x#y"]),
        ('X=${X:-"b c"}; Y=${Y:-d e}; a $X "$X" $Y', ["a", "b", "c", "b c", "d", "e"]),
        ("export X=${X:-b c}; a $X", ["a", "b", "c"]),
        ('X="\\\n  b \\\n  c"; a $X', ["a", "b", "c"]),
        ("srun -n 1 bash -c 'a b && c d'", ["c", "d"]),
        ("X=1\r\na $X\r\n", ["a", "1"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_words_have_their_line_numbers() -> None:
    command = commands("\n\nrun \\\n  --a 1 \\\n  --b '2\n3' --c\n")[-1]
    assert [(word.text, word.location.line) for word in command.words] == [
        ("run", 3), ("--a", 4), ("1", 4), ("--b", 5), ("2\n3", 5), ("--c", 6),
    ]  # fmt: skip


def test_line_numbers_within_bash_c() -> None:
    command = commands('\nbash -c "a \\\n  --b \\\n --c"')[-1]
    assert [(word.text, word.location.line) for word in command.words] == [("a", 2), ("--b", 3), ("--c", 4)]


def test_exports_and_variables_set_for_one_command() -> None:
    command = commands("A=1\nexport B=2 C\nC=3\nD=4 run")[-1]
    assert {name: word.text for name, word in command.environment.items()} == {"B": "2", "C": "3", "D": "4"}


def test_assignments_in_branches_do_not_override_earlier_ones() -> None:
    assert words("A=1\nif x; then A=2; B=3; fi\nfor i in 1; do A=4; done\nx && A=5\na $A $B") == ["a", "1", "3"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb 'c", 2),
        ('a\n\nb "c', 3),
        ("a ${X", 1),
        ("a $(b", 1),
        ("X=(1 2", 1),
        ("a <<EOF\nb\n", 1),
        ("\na << \n", 2),
    ],
)
def test_unclosed_quotes_and_brackets_are_refused_with_their_line(text: str, line: int) -> None:
    with pytest.raises(ConfigNotReadable, match=f"x.sh:{line}: "):
        commands(text)


def test_variables_that_grow_without_end_are_refused() -> None:
    with pytest.raises(ConfigNotReadable, match="grows"):
        commands("A=aaaaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 9)
    with pytest.raises(ConfigNotReadable, match="deep"):
        inner = "x"
        for _ in range(5):
            inner = f"bash -c {__import__('shlex').quote(inner)}"
        commands(inner)


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    commands(f"touch {target}; $(touch {target}); `touch {target}`; bash -c 'touch {target}'; a > {target}")
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "value"), [("1 + 2*3", 7), ("-8/3", -2), ("(1", None), ("9**9", None), ("a", None), ("7 % 4", 3)]
)
def test_arithmetic(text: str, value: int | None) -> None:
    assert evaluate_arithmetic(text) == value


PIECES = st.sampled_from(
    [
        *(
            "a",
            "--b",
            "X=1",
            "$X",
            "${X",
            "}",
            "${X:-",
            "$((",
            "))",
            "$(",
            ")",
            "(",
            "'",
            '"',
            "\\",
            "\n",
            " ",
            "<<EOF",
        ),
        *("EOF", "|", "&&", ";", ">", "2>&1", "`", "#", "X+=(", "${X[@]}", "if", "fi", "case", "esac", "bash -c "),
        *("read X ", "=", "\0"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(PIECES, max_size=40).map("".join), st.text(max_size=80)))
def test_any_script_is_parsed_or_refused(text: str) -> None:
    try:
        for command in commands(text):
            assert all(isinstance(word.text, str) and word.location.line >= 1 for word in command.words)
    except ConfigNotReadable as error:
        assert error.file == "x.sh"
