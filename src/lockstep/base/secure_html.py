"""Gives a self-contained HTML page a strict content security policy: nothing is loaded, nothing runs."""

import base64
import hashlib
import re

_STYLE_ELEMENT = re.compile(r"<style\b[^>]*>(.*?)</style>", re.DOTALL)
_STYLE_ATTRIBUTE = re.compile(r' style="([^"]*)"')
_POLICY = "default-src 'none'; style-src '{style}'; base-uri 'none'; form-action 'none'"


def with_strict_policy(page: str, pictures: bool = False) -> str:
    """The page with a policy that allows one style sheet, known by its digest, and forbids scripts, images, requests,
    forms and frames. Text of others that slips through the escaping of a page can then do nothing.

    All style elements become one in the page's head. Style attributes become rules of it, since a policy that allows
    them would allow injected ones, too.

    Args:
        page: HTML whose texts are escaped with their double quotes, as Jinja's `autoescape` does. It has a head with
            `<meta charset="utf-8">`.
        pictures: allow images that the page itself has, as `data:` addresses. They load nothing and run nothing.
    """
    sheets = list(dict.fromkeys(_STYLE_ELEMENT.findall(page)))
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f' data-style="{numbers.setdefault(match[1], len(numbers))}"'

    page = _STYLE_ATTRIBUTE.sub(numbered, _STYLE_ELEMENT.sub("", page))
    # A browser replaces no entities in a style sheet, unlike in an attribute.
    sheets += [f'[data-style="{number}"] {{ {_unescaped(text)} }}' for text, number in numbers.items()]
    sheet = "\n".join(sheets)
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    policy = _POLICY.format(style=f"sha256-{digest}") + ("; img-src data:" if pictures else "")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{sheet}</style>'
    charset = '<meta charset="utf-8">'
    if charset not in page:
        raise ValueError(f"the page has no {charset} in its head")
    return page.replace(charset, f"{charset}\n{head}", 1)


def _unescaped(text: str) -> str:
    for entity, character in (("&#34;", '"'), ("&quot;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        text = text.replace(entity, character)
    if "<" in text or "}" in text:
        raise ValueError(f"a style attribute that no style sheet may contain: {text!r}")
    return text
