"""The policy of a page names its one style sheet by its digest."""

import base64
import hashlib
import re

import pytest

from lockstep.base.secure_html import with_strict_policy

PAGE = (
    '<head><meta charset="utf-8"><style>a { b: c }</style></head><body><p style="width: 3%">x</p>'
    '<p style="width: 3%; content: &#34;&amp;&#34;">style=&#34;y&#34;</p>'
    '<svg><style type="text/css">*{d: e}</style></svg>'
)


def test_styles_become_one_sheet_with_a_digest() -> None:
    made = with_strict_policy(PAGE)
    (sheet,) = re.findall(r"<style>(.*?)</style>", made, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}';" in made
    assert "a { b: c }" in sheet and "*{d: e}" in sheet
    assert '[data-style="0"] { width: 3% }' in sheet and 'content: "&" }' in sheet
    assert not re.search(r'<[^>]* style="', made) and "unsafe" not in made
    assert "style=&#34;y&#34;" in made


def test_only_pictures_of_the_page_itself_are_allowed() -> None:
    assert "img-src" not in with_strict_policy(PAGE)
    assert "form-action 'none'; img-src data:\"" in with_strict_policy(PAGE, pictures=True)


@pytest.mark.parametrize("value", ["a } body { b", "&lt;/style>", "x </style>"])
def test_a_style_that_would_leave_the_sheet_is_refused(value: str) -> None:
    if "&lt;" in value:
        assert "&lt;/style>" in with_strict_policy(PAGE.replace("width: 3%", value))
        return
    with pytest.raises(ValueError, match="style sheet"):
        with_strict_policy(PAGE.replace("width: 3%", value))


def test_a_page_without_a_charset_is_refused() -> None:
    with pytest.raises(ValueError, match="charset"):
        with_strict_policy("<html></html>")
