"""An answer as one page, with nothing that is loaded from elsewhere."""

from typing import TYPE_CHECKING

from jinja2 import Environment, select_autoescape

from lockstep.doctor.answer.text import headline, rows, safe

if TYPE_CHECKING:
    from lockstep.doctor.explain import Explained

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; color: {{ colour }}; }
th { text-align: left; vertical-align: top; color: #666; font-weight: normal; padding-right: 1rem; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
code { color: #666; }
</style></head><body>
<h1>{{ title }}</h1>
<p><code>{{ verdict.cause }}</code>, confidence {{ "%.2f" | format(verdict.confidence) }}</p>
<p>{{ verdict.explanation }}</p>
<table>{% for name, text in rows %}<tr><th>{{ name }}</th><td>{{ text }}</td></tr>{% endfor %}</table>
</body></html>
"""


def page(explained: "Explained") -> str:
    """The whole document; what stands in logs is escaped."""
    verdict = explained.verdict
    environment = Environment(autoescape=select_autoescape(default_for_string=True, default=True))
    return environment.from_string(_PAGE).render(
        title=safe(headline(explained)),
        colour="#186a3b" if verdict.cause == "benign" else "#922b21",
        verdict=verdict,
        rows=[(name, safe(text)) for name, text in rows(verdict)],
    )
