"""Write the figures of the hardware catalogue to docs/catalogue.md: `python -m tools.figures`.

What is fitted to measurements (`efficiency`, `calibrated`) stands in the files alone, and in docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.hardware.devices import DEVICES, device_kinds, read_yaml
from weft.hardware.topology_files import LINKS, topologies

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
HEAD = """# Catalogue of hardware

The devices, links and machines that commands know by name, with their figures.

Written by `python -m tools.figures` from `src/weft/hardware/catalogue/`, where each figure has its source. Peaks are
those of dense matrices, in 10^12 operations a second; rates are 10^9 bytes a second, of links each way; memory is in
GiB. `~` marks a figure that is assumed or was not looked up, in part or as a whole. Shares of tiles, and figures that
are fitted to measurements ([accuracy](accuracy.md)), stand in the files alone.
"""
# Of a device kind, in the order of the page, each with the head of its column.
FIGURES = {
    "peaks_tflops": "peaks",
    "traffic_gb_per_second": "memory rate",
    "memory_gib": "memory",
    "units": "units",
    "slowdown": "slowdown beside communication",
    "host_gb_per_second": "host rate",
    "start_microseconds": "start of a call, µs",
    "act_microseconds": "act, µs",
}


def page() -> str:
    """The text of the page."""
    return "\n".join((HEAD, *_devices(), *_links(), *_topologies())) + "\n"


def _devices() -> Iterator[str]:
    yield f"## Device kinds\n\n{_row('kind', *FIGURES.values())}\n|{'---|' * (len(FIGURES) + 1)}"
    for name in device_kinds():
        content = read_yaml(DEVICES / f"{name}.yaml")
        yield _row(name, *(_figure(content, key) for key in FIGURES))
    yield ""


def _figure(content: dict[str, Any], key: str) -> str:
    source = content["sources"].get(key)
    if source is None:
        return ""
    return _guess(source) + _value(content.get(key, 1))


def _guess(source: str) -> str:
    """The mark of a figure that is a guess."""
    return "~" if "assumed" in source or "not looked up" in source else ""


def _links() -> Iterator[str]:
    yield "## Links\n\n| kind | rate |\n|---|---|"
    for name, content in read_yaml(LINKS).items():
        yield _row(name, f"{content['gb_per_second']:g}")
    yield ""


def _topologies() -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in topologies())
    yield f"## Topologies\n\n{names}. Latencies of their switches are assumed."


def _value(content: Any) -> str:
    if isinstance(content, dict):
        return ", ".join(f"{key} {value:g}" for key, value in content.items())
    return f"{content:g}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
