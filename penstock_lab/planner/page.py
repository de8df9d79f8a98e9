"""A page with a picture and its tables: one file, legible in light and dark mode, without scripts or network access."""

import html
from collections.abc import Sequence

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #1d2126 }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #16191d; --ink: #e8ebee }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink) }}
img, svg {{ width: 100%; height: auto }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th {{ font-weight: normal; text-align: left }} td {{ text-align: right }}
td, th {{ padding: .2rem .8rem; white-space: nowrap; border-bottom: 1px solid #8886 }}
</style>
<h1>{title}</h1><p>{about}</p>
{body}
</html>
"""


def page(title: str, about: str, body: str) -> str:
    """Return a page. Title and `about` are text, the body is HTML."""
    return PAGE.format(title=html.escape(title), about=html.escape(about), body=body)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, each a label followed by cells, as an HTML table."""
    lines = (
        f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n"
        for label, *cells in rows
    )
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>\n'
