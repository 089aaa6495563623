"""Parses shell scripts without running them, into simple commands with line numbers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.doctor.configs.config_settings import ConfigLocation
from lockstep.doctor.configs.shell_words import (
    CONTINUED,
    MAX_WORDS,
    NAME,
    UNSET,
    WordPiece,
    WordReader,
    join_words,
    raw_word_text,
    word_text,
)


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word of a command after expansion."""

    text: str
    location: ConfigLocation

    @property
    def known(self) -> bool:
        """Whether it contains nothing that only running the script would reveal."""
        return UNSET not in self.text


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command: its words, and the variables set for it."""

    words: tuple[ShellWord, ...]
    environment: dict[str, ShellWord] = field(default_factory=dict)


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_DESCRIPTOR = re.compile(r"\d+(?=[<>])")
_OPERATORS = (";;", "&&", "||", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", ">", "<", "|", "&", ";", "(", ")")
MAX_NESTED = 3
_OPENING, _CLOSING = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_KEYWORDS = {
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "for",
    "while",
    "until",
    "do",
    "done",
    "case",
    "esac",
    "{",
    "}",
    "!",
    "time",
    "function",
    "select",
    "in",
}


_DECLARING = ("export", "declare", "typeset", "readonly", "local")
"""Commands of which the arguments are assignments."""
ExpandedWord = list[list[WordPiece]]
"""The words to which one written word expands."""


@dataclass(frozen=True, slots=True)
class PendingHeredoc:
    """A here-document (`<<END`) of which the body begins on the next line."""

    delimiter: str
    strip_tabs: bool
    quoted: bool
    """Whether the delimiter is quoted, so that the body is not expanded."""
    line: int


def _with_whole_assignments(words: list[ExpandedWord]) -> list[list[WordPiece]]:
    """The words of a command. The shell splits what a word expands to, but not the value of an assignment: in front of
    a command, or after `export` and the like."""
    found: list[list[WordPiece]] = []
    assigns = True
    for expanded in words:
        first = word_text(expanded[0]) if expanded else ""
        if assigns and _ASSIGNMENT.match(first) and not expanded[0][0].quoted:
            found.append(join_words(expanded))
        else:
            assigns = assigns and (first in _KEYWORDS or first in _DECLARING)
            found.extend(expanded)
    return found


class ShellScript(WordReader):
    """Parses a script; keeps the variables as they are at the current position.

    Args:
        certain: whether a variable that a condition gives another value is unknown; otherwise it keeps the first value.
    """

    def __init__(self, text: str, file: str, certain: bool = False) -> None:
        super().__init__(text, file)
        self.certain = certain
        self.exported: set[str] = set()
        self.heredocs: list[PendingHeredoc] = []
        self.bodies: list[list[WordPiece]] = []
        """Bodies of the here-documents of the current command."""
        self.words_read = 0
        self.depth = 0
        """Number of `if`, `case` and loops around the current command."""
        self.pending: str | None = None
        """An operator that was read ahead."""
        self.nested = 0
        """Number of `bash -c` around this script."""

    def commands(self) -> Iterator[ShellCommand]:
        """All simple commands in order, including those inside conditions and loops."""
        words: list[ExpandedWord] = []
        conditional = False
        while True:
            token = self._next()
            if isinstance(token, list):
                words.append(token)
                self.words_read += 1
                if self.words_read > MAX_WORDS:
                    raise self._fail(f"more than {MAX_WORDS} words")
                continue
            if token in (">", ">>", "<", ">&", "<&", "&>", "<<<"):
                target = self._next()
                self.pending = target if isinstance(target, str) else None
                continue
            if token == "(" and words and self._array(words, conditional):
                continue
            if token in ("<<", "<<-"):
                self._heredoc(dash=token == "<<-")
                continue
            if words:
                yield from self._command(words, conditional)
                words = []
            conditional = token in ("&&", "||")
            if token == "":
                return

    def _next(self) -> str | ExpandedWord:
        if self.pending is not None:
            token, self.pending = self.pending, None
            return token
        return self._token()

    def _command(self, words: list[ExpandedWord], conditional: bool) -> Iterator[ShellCommand]:
        """Carries out assignments and yields the command, if it is one.

        Args:
            words: the written words of the command.
            conditional: whether it follows && or ||, so that it may not run.
        """
        flat = _with_whole_assignments(words)
        while flat and (keyword := word_text(flat[0])) in _KEYWORDS:
            self.depth = max(0, self.depth + (keyword in _OPENING) - (keyword in _CLOSING))
            flat = flat[1:]
        bodies, self.bodies = self.bodies, []
        assigned: dict[str, list[WordPiece]] = {}
        while flat and (match := _ASSIGNMENT.match(word_text(flat[0]))) and not flat[0][0].quoted:
            value = _skip_characters(flat[0], match.end())
            if match[2]:
                value = [*join_words(self.variables.get(match[1], [])), *value]
            assigned[match[1]] = self._bounded(value)
            flat = flat[1:]
        if not flat:
            for name, value in assigned.items():
                self._assign(name, [value], conditional)
            return
        first = word_text(flat[0])
        if first in _DECLARING:
            self._declare(first, flat[1:], conditional)
        elif (script := _script_within(flat)) is not None:
            yield from self._commands_of_script(script)
        elif first == "read" and bodies:  # `read NAME <<END` assigns the here-document
            name = word_text(flat[-1])
            if NAME.fullmatch(name):
                self.variables[name] = [bodies[-1]]
        elif first == "unset":
            for word in flat[1:]:
                self.variables.pop(word_text(word), None)
                self.exported.discard(word_text(word))
        else:
            environment = {n: join_words(self.variables[n]) for n in sorted(self.exported) if n in self.variables}
            environment |= assigned
            yield ShellCommand(
                tuple(self._word(word) for word in flat), {name: self._word(v) for name, v in environment.items()}
            )

    def _assign(self, name: str, value: list[list[WordPiece]], conditional: bool) -> None:
        """Sets a variable; an assignment that may not run does not override an earlier one."""
        if not (conditional or self.depth) or name not in self.variables:
            self.variables[name] = value
        elif self.certain:
            self.variables[name] = self._either(self.variables[name], value)

    def _either(self, before: list[list[WordPiece]], value: list[list[WordPiece]]) -> list[list[WordPiece]]:
        """The words of a variable that has one of two values: unknown where they differ, but for a common beginning."""
        texts, others = ([word_text(each) for each in words] for words in (before, value))
        unknown = WordPiece(UNSET, self.line)
        if texts == others:
            return before
        if texts and texts == others[: len(texts)]:
            return [*before, [unknown]]
        if len(texts) == len(others) == 1 and others[0].startswith(f"{texts[0]} "):
            return [[*before[0], WordPiece(" ", self.line), unknown]]
        return [[unknown]]

    def _commands_of_script(self, pieces: list[WordPiece]) -> Iterator[ShellCommand]:
        """The commands of `bash -c '...'`."""
        if self.nested >= MAX_NESTED:
            raise self._fail("shells are nested too deeply")
        inner = ShellScript(raw_word_text(pieces).replace(CONTINUED, "\\\n"), self.file, self.certain)
        inner.line, inner.nested = pieces[0].line if pieces else self.line, self.nested + 1
        inner.variables = {name: self.variables[name] for name in self.exported if name in self.variables}
        inner.exported = set(self.exported)
        yield from inner.commands()

    def _declare(self, how: str, words: list[list[WordPiece]], conditional: bool) -> None:
        exports = how == "export" and not (conditional or self.depth)
        for word in words:
            text = word_text(word)
            if text.startswith("-"):
                exports = exports or "x" in text
            elif match := _ASSIGNMENT.match(text):
                self._assign(match[1], [self._bounded(_skip_characters(word, match.end()))], conditional)
                if exports:
                    self.exported.add(match[1])
            elif exports and NAME.fullmatch(text):
                self.exported.add(text)

    def _array(self, words: list[ExpandedWord], conditional: bool) -> bool:
        """Reads `NAME=(a b c)` up to the closing bracket; returns False if the words do not begin an array."""
        last = words[-1]
        match = _ASSIGNMENT.fullmatch(word_text(last[0])) if len(last) == 1 else None
        if match is None:
            return False
        began, elements = self.line, list(self.variables.get(match[1], [])) if match[2] else []
        while (token := self._token(newlines=False)) != ")":
            if token == "":
                raise self._fail(f"the bracket of {match[1]}=( is never closed", began)
            if isinstance(token, list):
                elements.extend(token)
                if len(elements) > MAX_WORDS:
                    raise self._fail(f"more than {MAX_WORDS} words")
        self._assign(match[1], elements, conditional)
        words.pop()
        return True

    def _heredoc(self, dash: bool) -> None:
        while self._peek() in (" ", "\t"):
            self._take()
        began, delimiter, quoted = self.line, "", False
        while (char := self._peek()) and not char.isspace() and char not in ";|&<>()":
            self._take()
            if char in "'\"\\":
                quoted = True
            else:
                delimiter += char
        if not delimiter:
            raise self._fail("a here-document (<<) without a delimiter", began)
        self.heredocs.append(PendingHeredoc(delimiter, dash, quoted, began))

    def _read_heredocs(self) -> None:
        """Reads the bodies of here-documents, which begin on the next line."""
        for heredoc in self.heredocs:
            body: list[WordPiece] = []
            while True:
                if self.at >= len(self.text):
                    raise self._fail(f"the here-document up to {heredoc.delimiter} does not end", heredoc.line)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, number = self.text[self.at : end], self.line
                self._take(end + 1 - self.at)
                if heredoc.strip_tabs:
                    line = line.lstrip("\t")
                if line == heredoc.delimiter:
                    break
                if not heredoc.quoted and line.endswith("\\"):
                    line = line[:-1]
                else:
                    line += "\n"
                body.extend([WordPiece(line, number)] if heredoc.quoted else self._expanded(line, number))
            self.bodies.append(self._bounded(body))
        self.heredocs = []

    def _token(self, newlines: bool = True) -> str | ExpandedWord:
        """Reads an operator, "\\n", "" at the end, or a word, which expands to any number of words."""
        while True:
            char = self._peek()
            if char == "":
                if self.heredocs:
                    first = self.heredocs[0]
                    raise self._fail(f"the here-document up to {first.delimiter} does not end", first.line)
                return ""
            if char == "\\" and self._peek(2) == "\\\n":
                self._take(2)
            elif char == "#":
                while self._peek() not in ("", "\n"):
                    self._take()
            elif char == "\n":
                self._take()
                if self.heredocs:
                    self._read_heredocs()
                if newlines:
                    return "\n"
            elif char.isspace():
                self._take()
            else:
                break
        if descriptor := _DESCRIPTOR.match(self.text, self.at):
            self._take(len(descriptor[0]))
        for operator in _OPERATORS:
            if self._peek(len(operator)) == operator:
                self._take(len(operator))
                return operator
        return self._read_word()

    def _word(self, pieces: list[WordPiece]) -> ShellWord:
        return ShellWord(word_text(pieces), ConfigLocation(self.file, pieces[0].line if pieces else self.line))


def _skip_characters(pieces: list[WordPiece], many: int) -> list[WordPiece]:
    """Drops the first `many` characters."""
    rest = []
    for piece in pieces:
        if many < len(piece.text):
            rest.append(WordPiece(piece.text[many:], piece.line, piece.quoted))
        many = max(0, many - len(piece.text))
    return rest


def _script_within(words: list[list[WordPiece]]) -> list[WordPiece] | None:
    """The script that is given to `bash -c`, also behind srun, ssh or docker exec; None if there is none."""
    for index in range(len(words) - 2):
        name, option = word_text(words[index]).rpartition("/")[2], word_text(words[index + 1])
        if name in ("bash", "sh") and option.startswith("-") and not option.startswith("--") and "c" in option:
            return words[index + 2]
    return None
