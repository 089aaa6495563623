import importlib
import sys
import time
from pathlib import Path

import pytest

from lockstep.cluster.node_versions import changed_since, imported_files, locate_files


def test_imported_files_are_located_on_the_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        (root / "fresh_package").mkdir(parents=True)
        (root / "fresh_package" / "__init__.py").touch()
        (root / "fresh_package" / "fresh_part.py").touch()
    monkeypatch.syspath_prepend(str(here))
    importlib.import_module("fresh_package.fresh_part")
    try:
        files = imported_files()
    finally:
        del sys.modules["fresh_package.fresh_part"], sys.modules["fresh_package"]
    assert {"fresh_package/__init__.py", "fresh_package/fresh_part.py"} <= {relative for _, relative in files}
    assert not any("site-packages" in file for file, _ in files), "changes show in their folder"
    monkeypatch.setattr(sys, "path", [str(there)])
    part = there / "fresh_package" / "fresh_part.py"
    assert [file for file in locate_files(files) if "fresh_package" in file] == [
        str(part.with_name("__init__.py")),
        str(part),
    ]
    only_here = here / "fresh_package" / "only_here.py"
    only_here.touch()
    more = [("/nothing/of/that/name.py", "that/name.py"), (str(only_here), "fresh_package/only_here.py")]
    assert locate_files(more) == [str(only_here)]
    after = time.time() + 3600
    assert changed_since(after, [str(part)]) is None
    assert changed_since(part.stat().st_mtime, [str(part)]) != str(part), "not newer than the process"
