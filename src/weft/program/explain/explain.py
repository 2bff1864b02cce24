"""The first page of `Program.explain`: exchanges, memory, limits; a screen for a model of any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from weft.compiler.options import Options
from weft.compiler.pipeline import Compiled
from weft.compiler.stages.lay_out import Deduced
from weft.program.explain.beside import exchange_lines
from weft.program.explain.details import deduction_notes
from weft.program.explain.limits import limit_lines, memory_line
from weft.program.explain.memory import ProgramMemory
from weft.program.explain.schedule import exceptions
from weft.program.explain.words import strategy_words, title
from weft.traces.events import joined_notes

# As many notes are shown.
NOTES = 4


def explain(compiled: Compiled, options: Options, peaks: ProgramMemory, step: str) -> str:
    """The summary as plain text; `peaks` is the memory of the ranks of this process, `step` what a step takes."""
    lines = (
        title(compiled.graph),
        f"strategy: {strategy_words(compiled, options)}",
        step,
        *exchange_lines(compiled),
        memory_line(peaks),
        *limit_lines(compiled, options, peaks),
        *_layouts(compiled.deduced),
        *_notes(compiled),
        'tables of all layouts and boxing: explain(details=True); of some ops: explain(op="PATTERN")',
    )
    return "\n".join(lines) + "\n"


def _layouts(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Say if layouts are proven cheapest: a line for all stages, or for the first that is not."""
    unproven = [each for each in deduced if not each.proven]
    if len(deduced) > 1 and unproven:
        yield f"layouts: proven cheapest in {len(deduced) - len(unproven)} of {len(deduced)} stages"
    shown = unproven[:1] or deduced[:1]
    yield next(deduction_notes(shown), "layouts: there is nothing to choose")
    broken = sum(each.broken for each in deduced)
    if broken:
        yield f"note: {broken} uses of parameters depart from the strategy's layouts: their ops admit nothing else"


def _notes(compiled: Compiled) -> Iterator[str]:
    """Wishes that were not possible, and differences from a step of the whole batch; repeated blocks once."""
    found = joined_notes((*compiled.notes, *exceptions(compiled.graph)))
    yield from (f"note: {text}" for text in found[:NOTES])
    if len(found) > NOTES:
        yield f"… and {len(found) - NOTES} more notes, below the tables"


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
