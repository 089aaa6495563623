"""Shell scripts, read and not run: simple commands with the lines they stand on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.doctor.configs.settings import Place
from lockstep.doctor.configs.words import MAX_WORDS, NAME, UNSET, Piece, Words, joined, text_of


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command after expansion."""

    text: str
    place: Place

    @property
    def known(self) -> bool:
        """Whether nothing of it is left open."""
        return UNSET not in self.text


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: its words, and the variables that it is started with."""

    words: tuple[Word, ...]
    environment: dict[str, Word] = field(default_factory=dict)


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_DESCRIPTOR = re.compile(r"\d+(?=[<>])")
_OPERATORS = (";;", "&&", "||", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", ">", "<", "|", "&", ";", "(", ")")
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


class Script(Words):
    """A script and what its variables are at the place that is being read."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text, file)
        self.exported: set[str] = set()
        self.heredocs: list[tuple[str, bool, bool]] = []
        self.bodies: list[list[Piece]] = []
        self.words_read = 0

    def commands(self) -> Iterator[Command]:
        """All simple commands in their order, whatever conditions and loops stand around them."""
        words: list[list[list[Piece]]] = []
        while True:
            token = self._token()
            if isinstance(token, list):
                words.append(token)
                self.words_read += 1
                if self.words_read > MAX_WORDS:
                    raise self._fail(f"more than {MAX_WORDS} words")
                continue
            if token in (">", ">>", "<", ">&", "<&", "&>", "<<<"):
                self._token()
                continue
            if token == "(" and words and self._array(words):
                continue
            if token in ("<<", "<<-"):
                self._heredoc(dash=token == "<<-")
                continue
            if words:
                yield from self._command(words)
                words = []
            if token == "":
                return

    def _command(self, words: list[list[list[Piece]]]) -> Iterator[Command]:
        """`words`: of each word as it is written what it expands to."""
        flat = [each for expanded in words for each in expanded]
        while flat and text_of(flat[0]) in _KEYWORDS:
            flat = flat[1:]
        bodies, self.bodies = self.bodies, []
        assigned: dict[str, list[Piece]] = {}
        while flat and (match := _ASSIGNMENT.match(text_of(flat[0]))) and not flat[0][0].quoted:
            value = _after(flat[0], match.end())
            if match[2]:
                value = [*joined(self.variables.get(match[1], [])), *value]
            assigned[match[1]] = self._bounded(value)
            flat = flat[1:]
        if not flat:
            self.variables |= {name: [value] for name, value in assigned.items()}
            return
        first = text_of(flat[0])
        if first in ("export", "declare", "typeset", "readonly", "local"):
            self._declare(first, flat[1:])
        elif first == "read" and bodies:
            name = text_of(flat[-1])
            if NAME.fullmatch(name):
                self.variables[name] = [bodies[-1]]
        elif first == "unset":
            for word in flat[1:]:
                self.variables.pop(text_of(word), None)
                self.exported.discard(text_of(word))
        else:
            environment = {n: joined(self.variables[n]) for n in sorted(self.exported) if n in self.variables}
            environment |= assigned
            yield Command(
                tuple(self._word(word) for word in flat), {name: self._word(v) for name, v in environment.items()}
            )

    def _declare(self, how: str, words: list[list[Piece]]) -> None:
        exports = how == "export"
        for word in words:
            text = text_of(word)
            if text.startswith("-"):
                exports = exports or "x" in text
            elif match := _ASSIGNMENT.match(text):
                self.variables[match[1]] = [self._bounded(_after(word, match.end()))]
                if exports:
                    self.exported.add(match[1])
            elif exports and NAME.fullmatch(text):
                self.exported.add(text)

    def _array(self, words: list[list[list[Piece]]]) -> bool:
        """`NAME=(a b c)`: read up to the bracket that closes it."""
        last = words[-1]
        match = _ASSIGNMENT.fullmatch(text_of(last[0])) if len(last) == 1 else None
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
        self.variables[match[1]] = elements
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
            raise self._fail("a here-document without the word that ends it", began)
        self.heredocs.append((delimiter, dash, quoted))

    def _read_heredocs(self) -> None:
        """Their bodies, which begin behind the line that names them."""
        for delimiter, dash, quoted in self.heredocs:
            body: list[Piece] = []
            began = self.line
            while True:
                if self.at >= len(self.text):
                    raise self._fail(f"the here-document up to {delimiter} does not end", began)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, number = self.text[self.at : end], self.line
                self._take(end + 1 - self.at)
                if dash:
                    line = line.lstrip("\t")
                if line == delimiter:
                    break
                if not quoted and line.endswith("\\"):
                    line = line[:-1]
                else:
                    line += "\n"
                body.extend([Piece(line, number)] if quoted else self._expanded(line, number))
            self.bodies.append(self._bounded(body))
        self.heredocs = []

    def _token(self, newlines: bool = True) -> str | list[list[Piece]]:
        """An operator, "\\n", "" at the end, or a word: what it expands to, several words or none."""
        while True:
            char = self._peek()
            if char == "":
                if self.heredocs:
                    raise self._fail(f"the here-document up to {self.heredocs[0][0]} does not end")
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

    def _word(self, pieces: list[Piece]) -> Word:
        return Word(text_of(pieces), Place(self.file, pieces[0].line if pieces else self.line))


def _after(pieces: list[Piece], many: int) -> list[Piece]:
    """Without the first `many` characters."""
    rest = []
    for piece in pieces:
        if many < len(piece.text):
            rest.append(Piece(piece.text[many:], piece.line, piece.quoted))
        many = max(0, many - len(piece.text))
    return rest
