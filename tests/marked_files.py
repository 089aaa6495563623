"""Which files of tests an expression of marks, `pytest -m`, can take anything from, without importing them."""

import itertools
import re
from pathlib import Path

from _pytest.mark.expression import Expression


class MarkedFiles:
    """The files below `root`, of which no two have the same name."""

    def __init__(self, root: Path) -> None:
        self._paths = {path.stem: path for path in root.rglob("*.py")}
        self._found: dict[Path, tuple[set[str], set[str]]] = {}

    def may_take(self, expression: str, path: Path) -> bool:
        """Whether a test of the file may have marks that `expression` takes."""
        try:
            wanted = Expression.compile(expression)
        except SyntaxError:
            return True  # pytest itself says what is wrong with it
        asked = sorted(self.marks(path).intersection(re.findall(r"\w+", expression)))
        for has in itertools.product((False, True), repeat=len(asked)):
            marks = dict(zip(asked, has, strict=True))
            if wanted.evaluate(lambda name, /, marks=marks, **_: marks.get(name, False)):
                return True
        return False

    def marks(self, path: Path) -> set[str]:
        """The marks that a test of the file may have: those named in it or in a file that it imports."""
        waiting, seen, found = [path], {path}, set[str]()
        while waiting:
            named, imported = self._read(waiting.pop())
            found |= named
            more = {self._paths[each] for each in imported if each in self._paths} - seen
            seen |= more
            waiting += more
        return found

    def _read(self, path: Path) -> tuple[set[str], set[str]]:
        """The names of marks, and the last parts of the names of imported modules."""
        if path not in self._found:
            text = path.read_text()
            imports = re.findall(r"^\s*(?:from|import) +(?:\w+\.)*(\w+)", text, re.MULTILINE)
            self._found[path] = set(re.findall(r"\bmark\.(\w+)", text)), set(imports)
        return self._found[path]
