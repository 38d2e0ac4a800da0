"""What a notebook shows of a value at the end of a cell: text as it is printed, and pictures, as HTML.

A notebook asks a value for ``_repr_html_``. Those of this package answer with what they would print, by the functions
here, which escape it.

>>> preformatted("S[2 : 1@tp] <here>")
'<pre style="max-height: 40em; overflow: auto; white-space: pre; line-height: 1.25">S[2 : 1@tp] &lt;here&gt;</pre>'
"""

from __future__ import annotations

import base64
from html import escape

__all__ = ["preformatted", "with_picture"]

_STYLE = "max-height: 40em; overflow: auto; white-space: pre; line-height: 1.25"


def preformatted(text: str) -> str:
    """Return text as HTML that looks as on a terminal: in a box of its own, which scrolls where there is much of it."""
    return f'<pre style="{_STYLE}">{escape(text)}</pre>'


def with_picture(svg: str, text: str) -> str:
    """Return a picture as HTML, and below it text as `preformatted` has it.

    The SVG document is embedded as an image, so that its styles don't reach the page around it.
    """
    data = base64.b64encode(svg.encode()).decode()
    return f'<img style="max-width: 100%" src="data:image/svg+xml;base64,{data}">{preformatted(text)}'
