"""Reads YAML from outside within bounds: bytes, nesting, and the number of values after aliases are expanded.

A short YAML text can stand for billions of values ("billion laughs"): the parser shares them, and whoever walks through
them next does not. libyaml's own composer, a C function that calls itself, crashes the process on deep nesting.
"""

from pathlib import Path
from typing import Any

import yaml

from lockstep.base.errors import PicklableError

MAX_YAML_BYTES = 4 << 20
MAX_YAML_VALUES = 100_000
MAX_YAML_DEPTH = 60

_EVENTS: Any = getattr(yaml, "CParser", None)


class MalformedYaml(PicklableError, ValueError):
    """A text from outside that is not YAML, or not YAML within the bounds.

    Args:
        source: the file or the option.
        line: the line of the error, from 1; 0 if the whole text is concerned.
    """

    def __init__(self, source: str, line: int, problem: str, remedy: str = "") -> None:
        where = f"{source}, line {line}" if line else source
        super().__init__(f"{where}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.source, self.line, self.problem, self.remedy = source, line, problem, remedy


def read_yaml_text(path: Path) -> str:
    """The text of a YAML file, of which no more than the limit is read. Raises MalformedYaml, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_YAML_BYTES + 1)
    if len(data) > MAX_YAML_BYTES:
        raise MalformedYaml(str(path), 0, f"is larger than {MAX_YAML_BYTES >> 20} MiB, the limit for YAML")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedYaml(str(path), data[: error.start].count(b"\n") + 1, "is not UTF-8 text") from error


def parse_yaml(text: str, source: str, loader: Any = yaml.SafeLoader) -> Any:
    """The value of a YAML text. Raises MalformedYaml; `source` is named in it."""
    return _read(text, source, loader, construct=True)


def compose_yaml(text: str, source: str, loader: Any = yaml.SafeLoader) -> yaml.Node | None:
    """The nodes of a YAML text, with their lines; None if it is empty. Raises MalformedYaml."""
    node: yaml.Node | None = _read(text, source, loader, construct=False)
    return node


def _read(text: str, source: str, loader: Any, construct: bool) -> Any:
    if len(text) > MAX_YAML_BYTES:
        raise MalformedYaml(source, 0, f"is larger than {MAX_YAML_BYTES >> 20} MiB, the limit for YAML")
    try:
        _check_nesting(text, source, loader)
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is not None:
                _ValueCount(source).check(node, 0)
            return reader.construct_document(node) if construct and node is not None else node
        finally:
            reader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        raise MalformedYaml(source, line, f"is not valid YAML: {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, MalformedYaml):
            raise
        raise MalformedYaml(source, 0, f"is not valid YAML: {error}") from error
    except RecursionError:
        raise _too_deep(source, 0) from None


def _check_nesting(text: str, source: str, loader: Any) -> None:
    """Raises MalformedYaml if the text is nested too deeply. The parser's events need no recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=_EVENTS or loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_YAML_DEPTH:
                raise _too_deep(source, event.start_mark.line + 1 if event.start_mark else 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _ValueCount:
    """Counts the values of a document with every alias expanded, without expanding any."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: dict[int, tuple[int, int]] = {}
        """Number of values and height of nodes that may occur again."""
        self._open: set[int] = set()

    def check(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """Values in a node, and its height. Raises MalformedYaml if one of them is above the limit."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise MalformedYaml(self._source, line, "an alias stands for a value that contains the alias itself")
        if depth > MAX_YAML_DEPTH:
            raise _too_deep(self._source, line)
        if id(node) not in self._known:
            self._open.add(id(node))
            pairs = isinstance(node, yaml.MappingNode)
            children = [each for pair in node.value for each in pair] if pairs else node.value
            found = [self.check(each, depth + 1) for each in children]
            self._open.discard(id(node))
            height = 1 + max((each for _, each in found), default=0)
            self._known[id(node)] = 1 + sum(each for each, _ in found), height
        count, height = self._known[id(node)]
        if count > MAX_YAML_VALUES:
            problem = f"stands for more than {MAX_YAML_VALUES:,} values, those behind aliases included"
            raise MalformedYaml(self._source, line, problem, "write fewer values or aliases")
        if depth + height > MAX_YAML_DEPTH + 1:
            raise _too_deep(self._source, line)
        return count, height


def _too_deep(source: str, line: int) -> MalformedYaml:
    return MalformedYaml(source, line, f"is nested more than {MAX_YAML_DEPTH} levels deep", "make it flatter")
