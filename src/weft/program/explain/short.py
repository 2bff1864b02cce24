"""A program in a notebook: a few rows, short enough to stand below a cell."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled
from weft.program.explain.exchanges import exchange_lines
from weft.program.explain.limits import memory_line
from weft.program.explain.memory import ProgramMemory
from weft.program.explain.words import strategy_words, title

_CELL = "text-align: left; vertical-align: top"


def short_html(
    compiled: Compiled, options: Options, peaks: ProgramMemory, more: Mapping[str, str]
) -> str:
    """The model, the way its step is shared out, what is sent, memory, and `more` rows, as a table of HTML."""
    name, sent = title(compiled.graph), next(exchange_lines(compiled))
    words = {"strategy": strategy_words(compiled, options), **more}
    words |= dict(line.split(": ", 1) for line in (sent, memory_line(peaks)))
    rows = "".join(
        f'<tr><th style="{_CELL}">{escape(key)}</th><td style="{_CELL}">{escape(text)}</td></tr>'
        for key, text in words.items()
    )
    return f"<table><caption>{escape(name)}</caption><tbody>{rows}</tbody></table>"
