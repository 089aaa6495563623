"""What the model talks with while it generates: an environment, or tools."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.base import Section


class Environment(Section):
    """A conversation instead of one completion: after each of the model's turns the environment (or the tools that
    the turn calls) answers, until it is done. `rollout.sampling.max_tokens` bounds the conversation as a whole,
    answers included."""

    path: str | None = None
    """The environment: `file.py:Class` or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    tools: tuple[str, ...] = ()
    """Instead of a class: functions that the model may call, `file.py:function` or `package.module:function`."""
    parser: Literal["hermes", "regex"] = "hermes"
    """How calls are written: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or as
    `pattern` says."""
    pattern: str | None = None
    """Of the parser `regex`: finds a call; its group `arguments` is the one argument of the tool (or a JSON object of
    several), its group `name` the tool where there are several."""
    result: str = "{content}"
    """Of the parser `regex`: format string around what a tool returned."""
    max_turns: int = Field(8, gt=0)
    """Turns of the model; a conversation that wants more counts as truncated."""
    max_turn_tokens: int | None = Field(None, gt=0)
    """Longest turn of the model (a longer one ends the conversation, truncated); what is left of the whole when
    absent."""
    branches: tuple[int, ...] = ()
    """Into how many continuations a conversation splits once its first turn is answered, its second, and so on: `[4]`
    with a group size of eight makes two first turns and four continuations of each. Their product divides the group
    size."""
    workers: int = Field(1, gt=0)
    """Processes in which environments and tools run."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one answer; a process that does not come back is then replaced."""
    memory_mb: int | None = Field(None, gt=0)
    """Address space limit of one of the processes."""
    on_error: Literal["tell", "end", "stop"] = "tell"
    """What a failing or hanging environment or tool means: the model is told as an answer, the sample ends, or the run
    stops."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (not self.tools):
            raise ValueError("name either an environment's class in path, or functions in tools")
        if self.tools and self.arguments:
            raise ValueError("arguments belong to an environment's class: tools take theirs from the model")
        if (self.parser == "regex") != (self.pattern is not None):
            raise ValueError("the parser regex and a pattern go together: give both or none of them")
        if self.path is not None and self.parser == "regex":
            raise ValueError("parser and pattern are for tools: an environment's class reads the model's turns itself")
        if any(count < 1 for count in self.branches):
            raise ValueError(f"branches {list(self.branches)} must all be at least 1")
        if self.pattern is not None:
            _check_pattern(self.pattern, len(self.tools))
        if "{content}" not in self.result:
            raise ValueError(f"result {self.result!r} does not contain {{content}}")
        return self


def _check_pattern(pattern: str, tools: int) -> None:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    if "arguments" not in groups:
        raise ValueError(f"pattern {pattern!r} has no group (?P<arguments>...)")
    if tools > 1 and "name" not in groups:
        raise ValueError(f"pattern {pattern!r} has no group (?P<name>...), which tells the {tools} tools apart")
