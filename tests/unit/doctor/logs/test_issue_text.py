"""The text of an issue is taken apart into logs and prose."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs.issue_text import is_issue_text, log_blocks, take_apart
from lockstep.watch.supervisor.timeline_capture import header_line

ISSUE = """### Describe the bug

Hi, my GRPO job hangs after some hours. I first thought of `NCCL_P2P_DISABLE`, and last week we had a
CUDA out of memory error on another cluster, which a smaller batch solved. I use PyTorch 2.6.0 and NCCL version 2.21.5.

### Reproduction

```python
for batch in loader:
    raise ValueError("never printed")
```

<details><summary>The log</summary>

```text
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/train.py", line 88, in <module>
[rank1]:     main()
[rank1]:   File "/home/ann/train.py", line 61, in step
[rank1]:     loss = reward[index]
[rank1]: IndexError: list index out of range
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:31133.
```

</details>

> **Bob wrote:**
> does it also say
> ```
> step 10 loss 0.5
> ```

1. It says `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB` only with long prompts.
"""


def lines_of(text: str) -> dict[int, str]:
    """The kept lines by number."""
    return {number: line for number, line in enumerate(take_apart(text).lines, 1) if line.strip()}


def test_logs_keep_their_line_numbers_and_prose_becomes_empty() -> None:
    kept = lines_of(ISSUE)
    numbers = {number: ISSUE.splitlines()[number - 1] for number in kept}
    assert "[rank1]: IndexError: list index out of range" in kept.values()
    assert all(numbers[number] == line for number, line in kept.items() if line.startswith("[rank"))
    assert "step 10 loss 0.5" in kept.values(), "code inside a quote"
    text = "\n".join(kept.values())
    for prose in ("hangs after", "another cluster", "never printed", "Bob wrote", "NCCL_P2P_DISABLE"):
        assert prose not in text
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in kept.values()


def test_versions_stated_in_prose_are_kept_as_facts_and_are_no_log_lines() -> None:
    found = take_apart(ISSUE)
    assert found.versions == {"torch": "2.6.0", "nccl": "2.21.5"}
    assert "torch==2.6.0 nccl==2.21.5" in found.lines
    assert found.log_lines + found.prose_lines <= len(ISSUE.splitlines())
    assert take_apart("I use vLLM 0.8.5 here.").log_lines == 0


def test_a_log_pasted_without_a_fence_is_found() -> None:
    text = (
        "### What happened\nmy job died with this\n\nTraceback (most recent call last):\n"
        '  File "a.py", line 3, in f\n    x = d["k"]\nKeyError: \'k\'\n\nPlease help me with this one.\n'
    )
    assert list(lines_of(text).values()) == text.splitlines()[3:7]


@pytest.mark.parametrize(
    "text",
    [
        "step 1 loss 0.5\nstep 2 loss 0.4\n```\nprint(1)\n```\nstep 3 loss 0.3\n",
        "2026-11-21 14:10:00 INFO the model says the answer is here:\n# Title\n> quoted\n" * 4,
        "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'a'\n",
        "",
    ],
)
def test_a_log_is_no_issue_even_with_markdown_in_a_completion(text: str) -> None:
    assert not is_issue_text(text)
    assert b"".join(log_blocks("stdin", [text.encode()])) == text.encode()


def test_other_files_and_long_texts_pass_unchanged() -> None:
    assert list(log_blocks("rank_0.log", [ISSUE.encode(), b"x"])) == [ISSUE.encode(), b"x"]
    assert b"".join(log_blocks("issue.md", [b"# a\n", b"prose\n"])) == b"# a\nprose\n"


def test_a_captured_timeline_is_no_log() -> None:
    capture = header_line("run", 1.0, 2, 1).encode()
    assert list(log_blocks("timeline/steps.jsonl", [capture, b"RuntimeError: in a name\n"])) == []
    assert list(log_blocks("log.jsonl", [b'{"level": "info"}\n', b"x"])) == [b'{"level": "info"}\n', b"x"]


def test_an_issue_gets_the_verdict_of_its_log_with_the_lines_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "issue.md"
    file.write_text(ISSUE.replace("1. It says", "It said elsewhere:").partition("1. It")[0].partition("It said")[0])
    verdict = explain([str(file)]).verdict
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [1]
    lines = ISSUE.splitlines()
    assert any(each.line and "IndexError" in lines[each.line - 1] for each in verdict.evidence)
