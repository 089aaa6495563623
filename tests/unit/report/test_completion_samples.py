"""Completions for people to read: which are chosen, how they are shown, and that no text can do harm."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.data.samples import Completion, Episode, Group, Prompt, Rollouts
from lockstep.ledger import CompletionSample, Ledger
from lockstep.ledger.step_samples import NoSamples, choose_samples, ranges_text, read_samples
from lockstep.report.completion_samples import (
    sample_markdown,
    sample_text,
    shorten,
    shortened_sample,
)
from lockstep.report.html_report import render_html
from lockstep.report.live_console import LiveConsole
from lockstep.report.safe_console import SafeConsole

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/] </pre><script>alert(1)</script>\r\n```\n\u202eevil :smile: \ud800"
MESSAGES = [
    {"role": "assistant", "content": "I ask.", "tool_calls": [{"function": {"name": "length", "arguments": "{}"}}]},
    {"role": "tool", "name": "length", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]


def group(number: int, rewards: list[float], texts: list[str] | None = None, episode: Episode | None = None) -> Group:
    tokens = np.array([1, 2], np.int32)
    shown = texts or [f"text {number}.{k}" for k in range(len(rewards))]
    completions = [
        Completion(
            f"1/0:{number}/{k}", tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", text, None, episode
        )
        for k, text in enumerate(shown)
    ]
    prompt = Prompt(f"0:{number}", number, np.array([3], np.int32), f"prompt {number}", answer="a")
    values = np.array(rewards, np.float32)
    return Group(prompt, completions, values, {"length": values / 2})


def make_run(folder: Path, steps: int = 4, recipe: str = "grpo", **group_fields: Any) -> Ledger:
    ledger = Ledger.create(folder, {"recipe": recipe, "name": "x", "steps": 9})
    for step in range(steps):
        groups = [group(10 * step + each, [0.5, each - 1.0], **group_fields) for each in range(3)]
        ledger.record_rollouts(step, Rollouts(step, step, groups))
        ledger.record_samples(step, choose_samples(groups, 2))
        ledger.commit(step, {})
    return ledger


def chosen(groups: list[Group], count: int, order: Any = "spread") -> list[tuple[str, int, float | None]]:
    return [(each.uid, each.number, each.reward) for each in choose_samples(groups, count, order)]


def test_samples_are_chosen_by_reward() -> None:
    groups = [group(0, [0.0, 1.0]), group(1, [0.25, 1.0]), group(2, [-1.0, 0.5])]
    assert chosen(groups, 2) == [("0:0", 1, 1.0), ("0:2", 0, -1.0)], "the best and the worst"
    assert chosen(groups, 3) == [("0:0", 1, 1.0), ("0:2", 1, 0.5), ("0:2", 0, -1.0)]
    assert chosen(groups, 2, "best") == [("0:0", 1, 1.0), ("0:1", 1, 1.0)], "ties in the order of the data"
    assert chosen(groups, 2, "worst") == [("0:2", 0, -1.0), ("0:0", 0, 0.0)]
    assert len(chosen(groups, 99)) == 6 and chosen([], 2) == []
    unscored = Group(groups[0].prompt, groups[0].completions)
    assert [each.reward for each in choose_samples([unscored], 5)] == [None, None]


@given(st.text(max_size=300), st.integers(3, 50))
def test_shortened_texts_say_how_much_is_missing(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        head, _, tail = short.partition(f" [… {len(text) - limit:,} characters …] ")
        assert len(head) + len(tail) == limit and text.startswith(head) and text.endswith(tail)


def test_ranges() -> None:
    assert ranges_text([1, 5, 9, 10, 11]) == "1, 5, 9 to 11" and ranges_text([]) == ""


def printed(sample: CompletionSample, limit: int | None = 240, terminal: bool = False) -> str:
    stream = io.StringIO()
    SafeConsole(stream, soft_wrap=True, force_terminal=terminal).print(sample_text(sample, limit))
    return stream.getvalue()


def test_a_sample_on_a_terminal() -> None:
    sample = CompletionSample("p" * 300, "one\ntwo", "a", 0.5, {"exact": 1.0, "length": -0.25}, "0:1", "length")
    lines = printed(sample).splitlines()
    assert lines[0] == f"  prompt      {'p' * 160} [… 60 characters …] {'p' * 80}"
    assert lines[1:] == ["  completion  one ↵ two", "  reward      0.5  exact 1  length -0.25  truncated"]
    assert printed(sample, None).splitlines()[1:3] == ["  completion  one", "              two"]


def test_turns_and_calls_of_tools_are_shown() -> None:
    sample = choose_samples([group(0, [1.0], episode=Episode(MESSAGES, [], "answer"))], 1)[0]
    lines = printed(sample).splitlines()
    assert [line.split("  ")[1] for line in lines] == ["prompt", "assistant", "tool length", "assistant", "reward"]
    assert 'I ask. ↵ {"function": {"name": "length"' in lines[1] and lines[2].endswith("  5")
    many = CompletionSample("p", "z", messages=[{"role": "user", "content": str(n)} for n in range(20)])
    assert "…" in printed(many) and "12 turns" in printed(many) and len(printed(many).splitlines()) == 11
    assert len(printed(many, None).splitlines()) == 22


def test_hostile_texts_do_no_harm(tmp_path: Path) -> None:
    messages = [{"role": HOSTILE, "name": HOSTILE, "content": HOSTILE}]
    for sample in (
        CompletionSample(HOSTILE, HOSTILE, HOSTILE, 1.0, {HOSTILE: 1.0}, HOSTILE, HOSTILE),
        CompletionSample(HOSTILE, HOSTILE, messages=messages),
    ):
        text = printed(sample)
        assert "\x1b" not in text and "\x07" not in text and "\r" not in text and "\u202e" not in text
        assert "[bold red]x[/]" in text and ":smile:" in text, "as it is, and not as markup"
        assert "\x1b]" not in printed(sample, terminal=True) and "\x1b[2J" not in printed(sample, terminal=True)
        stream = io.StringIO()
        console = LiveConsole("x", tmp_path, 3, stream=stream)
        console.samples(1, [sample])
        assert "\x1b" not in stream.getvalue() and "[bold red]x[/]" in stream.getvalue()
        terminal = io.StringIO()
        console = LiveConsole("x", tmp_path, 3, stream=terminal, terminal=True)
        console.start()
        console.samples(1, [sample])
        console.close()
        assert "[bold red]x[/]" in terminal.getvalue(), "above the live block"
        assert "\x1b]" not in terminal.getvalue() and "\x1b[2J" not in terminal.getvalue()
        outside = [line for line in sample_markdown(sample).splitlines() if line and not line.startswith("    ")]
        assert not any("`" in line for line in outside)
    with make_run(tmp_path / "run", texts=[HOSTILE, HOSTILE]) as ledger:
        page = render_html(ledger, "finished")
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "Completions in training" in page


def test_samples_for_ledger_and_trackers_are_short_and_have_no_secrets() -> None:
    secret = "a-known-secret-value"
    long = f"{secret} " + "x" * 9000
    sample = CompletionSample(long, long, messages=[{**MESSAGES[0], "content": long}, MESSAGES[1]])
    short = shortened_sample(sample, (secret,))
    text = json.dumps([short.prompt, short.completion, short.messages])
    assert secret not in text and "[hidden]" in text and len(text) < 13_000
    assert short.messages is not None and set(short.messages[0]) == {"role", "content"}
    assert short.messages[1] == MESSAGES[1]


def test_steps_are_read_from_their_files_and_then_from_what_was_kept(tmp_path: Path) -> None:
    with make_run(tmp_path / "run") as ledger:
        found = read_samples(ledger, None, 9, "best")
        assert (found.number, found.total, len(found.samples), found.file) == (4, 6, 6, ledger.step_path(3))
        assert [each.reward for each in found.samples] == [1.0, 0.5, 0.5, 0.5, 0.0, -1.0]
        for step in (1, 2, 3):
            ledger.record_checkpoint(step, tmp_path / "c")
        ledger.delete_unneeded_steps()
        assert ledger.stored_steps() == [3]
        kept = read_samples(ledger, 2, 1, "worst")
        assert (kept.number, kept.total, kept.file) == (2, 6, None) and kept.samples[0].reward == -1.0
        with pytest.raises(
            NoSamples, match="step 9 is not complete yet: there are step files of 4, and a few samples of 1"
        ):
            read_samples(ledger, 9, 1, "best")
        ledger.rewind(1)
        assert [row.step for row in ledger.samples()] == [0]


def samples(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["samples", *arguments])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def test_the_command_shows_text_or_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, texts=["good", HOSTILE]).close()
    code, out, _ = samples(str(run), "--best", "-n", "1")
    assert code == 0 and "\x1b" not in out
    assert out.splitlines()[0] == f"step 4: 1 of 6 completions, from {run}/steps/00000004.arrow"
    assert "reward      1  length 0.5" in out
    code, out, _ = samples(str(run), "--step", "2", "--worst", "--n", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["step"] == 2 and found["file"].endswith("00000002.arrow") and found["completions"] == 6
    assert [each["reward"] for each in found["samples"]] == [-1.0, 0.0]
    assert found["samples"][0]["completion"] == HOSTILE and found["samples"][0]["terms"] == {"length": -0.5}


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    run, sft, new = tmp_path / "run", tmp_path / "sft", tmp_path / "new"
    make_run(run).close()
    make_run(sft, 0, "sft").close()
    make_run(new, 0).close()
    code, _, error = samples(str(run), "--step", "7")
    assert code == 2 and "step 7 is not complete yet: there are step files of 1 to 4 (steps count from 1)" in error
    assert samples(str(sft))[2].endswith("the recipe sft generates no completions")
    assert samples(str(new))[2].endswith("no step has all its completions yet")
    assert "runs in the same folder: new, run, sft" in samples(str(tmp_path / "nothing"))[2]
    assert "--best and --worst exclude each other" in samples(str(run), "--best", "--worst")[2]
    file = run / "steps" / "00000003.arrow"
    file.write_bytes(file.read_bytes()[:-20] + b"x" * 20)
    code, _, error = samples(str(run), "--step", "3")
    assert code == 2 and "00000003.arrow differs from what was written" in error
    assert samples(str(run), "--step", "2")[0] == 0


def test_the_report_shows_a_few_steps(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", 9) as ledger:
        page = render_html(ledger, "finished")
    steps = [step for step in range(1, 10) if f'<div class="tag">Step {step}</div>' in page]
    assert len(steps) == 6 and steps[0] == 1 and steps[-1] == 9
    assert "prompt 80" in page and "text 82.1" in page and "reward 1</span>" in page
