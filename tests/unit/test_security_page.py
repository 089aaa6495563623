"""The security page names every listener of the sources, every test of the attacks, and only tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
PACKAGE = ROOT / "src" / "lockstep"
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LISTENS = {"Listener", "listen", "create_server", "start_http_server", "start_server", "HTTPServer", "bind"}
"""Calls that open a port. `bind` alone is also a method of signatures and of ports that are only tried."""
ONLY_TRIES = {"watch/supervisor/multi_node.py", "doctor/check/probe/host_probe.py"}
"""Files that bind a port to find out whether it is free, and close it."""
IMPLEMENTS = {"base/network.py", "base/transport/auth_handshake.py", "report/server_connections.py"}
"""What the others listen by."""


def functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def opens_a_port(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in LISTENS:
                continue
            on_socket = name != "bind" or (
                len(node.args) == 1 and isinstance(node.args[0], ast.Tuple) and not node.keywords
            )
            own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("self", "recovery")
            if on_socket and not own:
                return True
    return False


def test_every_named_test_exists() -> None:
    named = NAMED_TEST.findall(PAGE)
    assert named
    missing = [
        f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in functions(ROOT / file)
    ]
    assert missing == []


def test_every_attack_is_on_the_page() -> None:
    named = set(NAMED_TEST.findall(PAGE))
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "tests" / "security").glob("test_*.py"))]
    tests = {(str(file), name) for file in files for name in functions(ROOT / file) if name.startswith("test_")}
    assert sorted(tests - named) == []


def test_every_listener_is_on_the_page() -> None:
    listening = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if opens_a_port(path)}
    named = set(re.findall(r"\| [^|]*\(`([\w/]+\.py)`\) \|", PAGE))
    assert sorted(listening - named - ONLY_TRIES - IMPLEMENTS) == []
    assert sorted(name for name in named if not (PACKAGE / name).is_file()) == []
    assert sorted((ONLY_TRIES | IMPLEMENTS) - listening) == []


def test_no_table_is_split() -> None:
    """A blank line ends a table, and the rows after it are shown as text."""
    assert re.findall(r"^\|.*\n\n\|.*\n(?!\|---)", PAGE, re.MULTILINE) == []
