"""Expands the words of a shell script without running it: quotes, variables and arithmetic."""

import ast
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from lockstep.doctor.configs.config_settings import ConfigNotReadable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 1 << 62


def evaluate_arithmetic(text: str) -> int | None:
    """Evaluates integers, brackets and + - * / %; None if the text contains anything else."""
    try:
        return _node_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _node_value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < _LARGEST:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_node_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_node_value(node.left), _node_value(node.right))
        if abs(value) < _LARGEST:
            return value
    raise ValueError("not integer arithmetic")


UNSET = "\ue000"
"""Placeholder in a word for text that only running the script would reveal."""
CONTINUED = "\ue001"
"""Placeholder in a word for a line continuation within quotes; it matters if the word is itself a script."""
MAX_WORD = 1 << 20
MAX_WORDS = 200_000
MAX_PARTS = 1 << 14


class WordPiece(NamedTuple):
    """Characters of a word, from one line."""

    text: str
    line: int
    quoted: bool = False


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_PLAIN = re.compile(r"[^\s;|&<>()\\'\"$`]+")


class WordReader:
    """Reads words from a position in a text, and expands the variables that are known there."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text.replace("\r\n", "\n"), file
        self.at, self.line = 0, 1
        self.variables: dict[str, list[list[WordPiece]]] = {}

    def _peek(self, many: int = 1) -> str:
        return self.text[self.at : self.at + many]

    def _take(self, many: int = 1) -> str:
        taken = self.text[self.at : self.at + many]
        self.at += many
        self.line += taken.count("\n")
        return taken

    def _fail(self, problem: str, line: int | None = None) -> ConfigNotReadable:
        return ConfigNotReadable(self.file, self.line if line is None else line, problem)

    def _read_word(self) -> list[list[WordPiece]]:
        """Reads up to the next blank or operator; an unquoted variable with blanks gives several words."""
        done: list[list[WordPiece]] = []
        current: list[WordPiece] | None = None
        parts_read = 0
        while (char := self._peek()) and not char.isspace() and char not in ";|&<>()":
            words, quoted, keeps_empty = self._read_part(char)
            for index, pieces in enumerate(words):
                if index:
                    if current is not None or keeps_empty:
                        done.append(current or [])
                    current = [] if keeps_empty else None
                for text, at, _ in pieces:
                    if len(current or ()) < 64:
                        current = [*(current or []), WordPiece(text, at, quoted)]
                    else:
                        current = _merge_pieces(current, text)
            if not words and keeps_empty:
                current = current or None
            parts_read += 1
            if parts_read > MAX_PARTS or len(done) > MAX_WORDS:
                raise self._fail("a word is too long")
        return [*done, *([current] if current is not None else [])]

    def _read_part(self, char: str) -> tuple[list[list[WordPiece]], bool, bool]:
        """Reads what one quote, backslash or dollar, or a run of plain text, adds to a word.

        Returns:
            The pieces, where a second item begins a new word; whether they are quoted; and whether empty words stay.
        """
        line = self.line
        if char == "\\":
            self._take()
            following = self._take()
            return [[] if following == "\n" else [WordPiece(following, line)]], True, False
        if char == "'":
            return [[WordPiece(self._until("'", line), line)]], True, False
        if char == '"':
            self._take()
            return [pieces or [WordPiece("", line)] for pieces in self._double_quoted(line)], True, True
        if self._peek(2) == "$'":
            self._take()
            return [[WordPiece(self._escaped(line), line)]], True, False
        if self._peek(2) == '$"':
            self._take()
            return [], False, False
        if char in "$`":
            return self._split(self._dollar()), False, False
        run = _PLAIN.match(self.text, self.at)
        return [[WordPiece(self._take(len(run[0]) if run else 1), line)]], False, False

    def _until(self, closing: str, began: int) -> str:
        """Reads from an opening quote to its end."""
        self._take()
        end = self.text.find(closing, self.at)
        if end < 0:
            raise self._fail(f"the quote {closing} is never closed", began)
        text = self._take(end - self.at)
        self._take()
        return text

    def _escaped(self, began: int) -> str:
        """Reads `'...'` after a `$`, in which backslashes begin escapes."""
        self._take()
        text: list[str] = []
        while (char := self._take()) != "'":
            if char == "":
                raise self._fail("the quote ' is never closed", began)
            following = self._take() if char == "\\" else ""
            text.append(_ESCAPES.get(following, char + following) if following else char)
        return "".join(text)

    def _double_quoted(self, began: int) -> list[list[WordPiece]]:
        """Reads double-quoted text: one word, or as many as `"${NAME[@]}"` has."""
        words: list[list[WordPiece]] = [[]]
        whole = True
        while (char := self._peek()) != '"':
            line = self.line
            if char == "":
                raise self._fail('the quote " is never closed', began)
            if char == "\\":
                self._take()
                following = self._take()
                if following in '"\\$`':
                    words[-1].append(WordPiece(following, line))
                elif following == "\n":
                    words[-1].append(WordPiece(CONTINUED, line))
                else:
                    words[-1].append(WordPiece("\\" + following, line))
            elif char in "$`":
                expanded = self._dollar()
                if not expanded and len(words) == 1 and not words[0] and self._peek() == '"':
                    whole = False
                for index, part in enumerate(expanded):
                    if index:
                        words.append([])
                    words[-1].extend(part)
            else:
                start = self.at
                while self._peek() not in ('"', "\\", "$", "`", ""):
                    self.at += 1
                text = self.text[start : self.at]
                self.line += text.count("\n")
                words[-1].append(WordPiece(text, line))
        self._take()
        return words if whole else []

    def _dollar(self) -> list[list[WordPiece]]:
        """Reads what follows `$` or a backquote; only an array gives more than one word."""
        line = self.line
        if self._peek() == "`":
            self._until("`", line)
            return [[WordPiece(UNSET, line)]]
        self._take()
        if self._peek(2) == "((":
            return self._arithmetic(line)
        if self._peek() == "(":
            self._balanced("(", ")", line)
            return [[WordPiece(UNSET, line)]]
        if self._peek() == "{":
            return self._braces(self._balanced("{", "}", line), line)
        match = NAME.match(self.text, self.at)
        if match:
            self._take(len(match[0]))
            return self._value(match[0], line)
        if self._peek() in ("@", "*"):
            self._take()
            return []
        if self._peek() and (self._peek().isdigit() or self._peek() in "#?$!-"):
            self._take()
            return [[WordPiece(UNSET, line)]]
        return [[WordPiece("$", line)]]

    def _balanced(self, opening: str, closing: str, began: int) -> str:
        depth, start = 0, self.at
        while True:
            char = self._take()
            if char == "":
                raise self._fail(f"the {opening} is never closed", began)
            if char == "'" and opening == "(":
                self.at -= 1
                self._until("'", began)
            elif char == "\\":
                self._take()
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return self.text[start + 1 : self.at - 1]

    def _arithmetic(self, line: int) -> list[list[WordPiece]]:
        inside = self._balanced("(", ")", line)[1:-1]
        if len(inside) > 1000:
            return [[WordPiece(UNSET, line)]]

        def value_of(match: re.Match[str]) -> str:
            value = word_text(join_words(self.variables.get(match[1], [[WordPiece(UNSET, line)]])))
            return value if len(value) < 30 else UNSET

        value = evaluate_arithmetic(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value_of, inside))
        return [[WordPiece(UNSET if value is None else str(value), line)]]

    def _braces(self, inside: str, line: int) -> list[list[WordPiece]]:
        """Expands `${NAME}`, `${NAME[@]}` and `${NAME:-default}` with its variants; other forms remain unknown."""
        match = NAME.match(inside)
        if match is None:
            return [[WordPiece(UNSET, line)]]
        name, rest = match[0], inside[match.end() :]
        if rest == "":
            return self._value(name, line)
        if rest in ("[@]", "[*]"):
            return (
                [list(each) for each in self.variables[name]] if name in self.variables else [[WordPiece(UNSET, line)]]
            )
        operator = re.match(r":?[-=+?]", rest)
        if operator is None:
            return [[WordPiece(UNSET, line)]]
        default = rest[operator.end() :]
        held = self.variables.get(name)
        known = held is not None and (bool(word_text(join_words(held))) or ":" not in operator[0])
        if operator[0][-1] == "+":
            return [self._expanded(default, line)] if known else []
        if known or operator[0][-1] == "?":
            return self._value(name, line)
        pieces = self._expanded(_unquoted(default), line)
        if operator[0][-1] == "=":
            self.variables[name] = [pieces]
        return [pieces]

    def _value(self, name: str, line: int) -> list[list[WordPiece]]:
        held = self.variables.get(name)
        if held is None:
            return [[WordPiece(UNSET, line)]]
        return [list(held[0])] if held else []

    def _expanded(self, text: str, line: int) -> list[WordPiece]:
        """Expands variables in a text that is not split into words, such as a line of a here-document."""
        if "$" not in text and "`" not in text:
            return [WordPiece(text, line)]
        if len(text) > 65536 or text.count("${") > 64:
            return [WordPiece(UNSET, line)]
        inner = WordReader(text, self.file)
        inner.line, inner.variables = line, self.variables
        pieces: list[WordPiece] = []
        while char := inner._peek():
            if char == "\\" and inner._peek(2)[1:] in ("$", "`", "\\"):
                inner._take()
                pieces.append(WordPiece(inner._take(), line))
            elif char in "$`":
                pieces.extend(join_words(inner._dollar()))
            else:
                start = inner.at
                while inner._peek() not in ("", "\\", "$", "`"):
                    inner.at += 1
                inner.at += inner.at == start
                pieces.append(WordPiece(text[start : inner.at], line))
        return self._bounded(pieces)

    def _split(self, words: list[list[WordPiece]]) -> list[list[WordPiece]]:
        """Splits words at blanks, as the shell does with an unquoted variable."""
        result: list[list[WordPiece]] = []
        for word in words:
            starts_word = True
            for text, line, _ in word:
                for index, part in enumerate(re.split(r"\s+", text)):
                    if index:
                        starts_word = True
                    if part:
                        if starts_word:
                            result.append([])
                        result[-1].append(WordPiece(part, line))
                        starts_word = False
        if len(result) > MAX_WORDS:
            raise self._fail(f"more than {MAX_WORDS} words")
        return [word for word in result if word_text(word)]  # a line continuation alone is no word

    def _bounded(self, pieces: list[WordPiece]) -> list[WordPiece]:
        if sum(len(piece.text) for piece in pieces) > MAX_WORD or len(pieces) > MAX_WORD:
            raise self._fail("a variable grows beyond one megabyte")
        return pieces


def word_text(pieces: list[WordPiece]) -> str:
    """The characters of a word."""
    return raw_word_text(pieces).replace(CONTINUED, "")


def raw_word_text(pieces: list[WordPiece]) -> str:
    """The characters of a word, with placeholders for line continuations within quotes."""
    return "".join(piece.text for piece in pieces)


def join_words(words: list[list[WordPiece]]) -> list[WordPiece]:
    joined: list[WordPiece] = []
    for word in words:
        if joined and word:
            joined.append(WordPiece(" ", word[0].line))
        joined.extend(word)
    return joined


def _merge_pieces(pieces: list[WordPiece] | None, text: str) -> list[WordPiece]:
    assert pieces
    return [*pieces[:-1], WordPiece(pieces[-1].text + text, pieces[-1].line, pieces[-1].quoted)]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
