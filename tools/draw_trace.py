"""Draw a trace that `Program.trace` has written as a picture: `python -m tools.draw_trace IN.json OUT.svg`."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, TOP = 1000, 190, 26, 10
COLOURS = {"communication": "#e39c37", "host": "#8d8d8d", "wait": "#eeeeee"}
COMPUTE = {"forward": "#5b8fd9", "backward": "#4aa37c", "weight": "#86c5a4", "update": "#a17cc9"}


def main(source: str, target: str) -> None:
    """Read a trace and write the picture."""
    events = json.loads(Path(source).read_text())["traceEvents"]
    Path(target).write_text(picture(events))


def picture(events: list[dict[str, Any]]) -> str:
    """The rows of all ranks as SVG; what a queue waited for is light."""
    slices = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = sorted({(e["pid"], e["tid"]) for e in slices if e["cat"] != "host"})
    rows = [row for row in shown if names[row] != "host"]
    end = max(event["ts"] + event["dur"] for event in slices)
    height = TOP + ROW * len(rows) + 34
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="11">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        parts.append(f'<text x="6" y="{y + 16}">rank {row[0]}: {escape(names[row])}</text>')
        parts += [_bar(e, y, end) for e in slices if (e["pid"], e["tid"]) == row]
    bottom = TOP + ROW * len(rows) + 20
    parts.append(f'<text x="{LEFT}" y="{bottom}">0</text>')
    parts.append(f'<text x="{WIDTH - 60}" y="{bottom}">{end / 1000:.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(event: dict[str, Any], y: int, end: float) -> str:
    scale = (WIDTH - LEFT - 10) / end
    x, width = LEFT + event["ts"] * scale, max(event["dur"] * scale, 0.4)
    late = event["cat"] == "wait" and "rank" in event["args"]
    colour = COLOURS.get(event["cat"]) or COMPUTE.get(event["name"].split()[0], "#5b8fd9")
    title = f"<title>{escape(event['name'])}</title>"
    top, height = (y + 14, 7) if late else (y + 2, ROW - 6)
    return (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{colour}" '
        f'stroke="white" stroke-width="0.3">{title}</rect>'
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
