"""docs/failures.md is the page generated from the knowledge base."""

from pathlib import Path
from typing import get_args

from lockstep.doctor.knowledge.catalogue import render_catalogue
from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.knowledge.knowledge_schema import FailureClass

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "failures.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render_catalogue(), (
        "run: python -m lockstep.doctor.knowledge.catalogue > docs/failures.md"
    )


def test_every_class_is_on_the_page_and_links_to_its_section() -> None:
    text = PAGE.read_text()
    for name in get_args(FailureClass):
        assert f"](#{name})" in text
        assert f"\n## {name}\n" in text


def test_fields_are_words_and_markup_in_sentences_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "class: port_in_use\ntitle: A\nexplanation: b\n"
        "signatures: [{id: own-rule, pattern: 'some words (?P<port>x)', explanation: 'Port {port} of <a_b> `c_d`.',"
        " examples: ['some words x | y'], sources: ['https://example.org/x']}]"
    )
    text = render_catalogue(load_knowledge(tmp_path))
    assert "- `` some words x | y ``<br>\n  shows this failure (0.8). Port *port* of" in text
    assert "of \\<a\\_b\\> `c_d`. <https://example.org/x>" in text
