"""The figures of a loop in Prometheus's text format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import final

from weft.errors import UserError
from weft.program.loop.log_files import STEP, check_figures, log_path
from weft.whole_files import check_writable, make_folder_of, write_in_folder

_PREFIX = "weft_"
_ELSE = re.compile(r"[^a-zA-Z0-9_]")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES = {ord("\\"): r"\\", ord('"'): r"\"", ord("\n"): r"\n"}


@final
class Prometheus:
    """A file with the newest figure of each name, for the textfile collector of Prometheus's node exporter.

    Each is a gauge: the figure "loss" is `weft_loss`; `weft_step` is the step that was logged last. What a name of
    Prometheus cannot have is `_` there. The file is written whole each time.

    Args:
        path: of the file; the collector reads those that end in ".prom".
        labels: of all gauges, such as {"run": "gpt"}.

    Raises:
        UserError: a label cannot be.
    """

    def __init__(self, path: str | Path, labels: Mapping[str, str] | None = None) -> None:
        self._path = log_path(path)
        self._figures: dict[str, float] = {}
        if not isinstance(labels, Mapping | None):
            raise UserError(
                f'weft.logs.Prometheus: labels takes texts by name, such as {{"run": "gpt"}}, found {labels!r}'
            )
        for name in labels or {}:
            if not isinstance(name, str) or not _LABEL.fullmatch(name) or name.startswith("__"):
                raise UserError(
                    "weft.logs.Prometheus: labels takes names of letters, digits and _, which begin with no digit "
                    f"and no __; found {name!r}"
                )
        pairs = (f'{name}="{str(x).translate(_ESCAPES)}"' for name, x in (labels or {}).items())
        self._labels = ",".join(pairs)

    def begin(self, step: int) -> None:
        """Look whether the file can be written.

        Raises:
            UserError: it cannot.
        """
        make_folder_of(self._path, "the log")
        check_writable(self._path, "the log")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the file.

        Raises:
            UserError: it cannot be written, a figure is called "step", or two have one name there.
        """
        check_figures(figures)
        self._figures |= {**figures, STEP: step}
        write_in_folder(self._path, self._text(), "the log")

    def close(self) -> None:
        """Nothing is open; the last figures stay."""

    def _text(self) -> str:
        named: dict[str, str] = {}
        lines = []
        for name, value in self._figures.items():
            gauge = _PREFIX + _ELSE.sub("_", name)
            if gauge in named:
                raise UserError(
                    f"weft.logs.Prometheus: the figures {named[gauge]!r} and {name!r} are both {gauge}; name them apart"
                )
            named[gauge] = name
            labels = f"{{{self._labels}}}" if self._labels else ""
            lines += [f"# TYPE {gauge} gauge", f"{gauge}{labels} {_number(value)}"]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """A number as the format has it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
