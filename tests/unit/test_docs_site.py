"""The documentation builds as a site without a warning, and every page has its place in it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def entries(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(inner, str)
    return [page for each in inner for page in entries(each)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation() -> None:
    listed = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra `dev` brings mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    assert "Generalised" in (tmp_path / "site" / "search" / "search_index.json").read_text()
