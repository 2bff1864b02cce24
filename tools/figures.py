"""Write the figures of the hardware catalogue with their sources to docs/catalogue.md: `python -m tools.figures`.

What is fitted to measurements (`efficiency`, `calibrated`) stands in the files alone, and in docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.hardware.kinds.device_kinds import DEVICES, device_kinds, read_yaml
from weft.hardware.topology.reading import LINKS, TOPOLOGIES, topologies

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
HEAD = """# Catalogue of hardware

After this page you can name a device or a machine in a command, and see where each of its figures is from.

Written by `python -m tools.figures` from `src/weft/hardware/catalogue/`. Peaks are those of dense matrices, in 10^12
operations a second; rates are 10^9 bytes a second, of links each way; memory is in GiB. A source that says *assumed* or
*not looked up* is a guess, or a figure whose source was named from memory; others were found there, or as quoted from
there.
What is fitted to measurements stands in [accuracy](accuracy.md).
"""
# Of a device kind, in the order of the page.
FIGURES = (
    *("peaks_tflops", "traffic_gb_per_second", "memory_gib", "units", "slowdown"),
    "host_gb_per_second",
    *("start_microseconds", "act_microseconds", "tiles"),
)


def page() -> str:
    """The text of the page."""
    return "\n".join((HEAD, *_devices(), *_links(), *_topologies())) + "\n"


def _devices() -> Iterator[str]:
    yield "## Device kinds\n"
    for name in device_kinds():
        content = read_yaml(DEVICES / f"{name}.yaml")
        yield f"### {name}\n\n| figure | value | source |\n|---|---|---|"
        for key in FIGURES:
            if key in content or key in content["sources"]:
                yield _row(key, _value(content.get(key, 1)), content["sources"][key])
        yield ""


def _links() -> Iterator[str]:
    yield "## Links\n\n| kind | rate | source |\n|---|---|---|"
    for name, content in read_yaml(LINKS).items():
        yield _row(name, _value(content["gb_per_second"]), content["source"])
    yield ""


def _topologies() -> Iterator[str]:
    yield "## Topologies\n\n| name | source |\n|---|---|"
    for name in topologies():
        yield _row(name, read_yaml(TOPOLOGIES / f"{name}.yaml")["source"])


def _value(content: Any) -> str:
    if isinstance(content, dict):
        return ", ".join(f"{key} {value:g}" for key, value in content.items())
    if isinstance(content, list):
        return ", ".join(f"{rows}×{columns}: {share:g}" for rows, columns, share in content)
    return f"{content:g}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
