"""`weft doctor`: what is here that weft needs, what is missing, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict

from weft.runtime.doctor import check_machine


def check_this_machine(as_json: bool = False) -> tuple[int, str]:
    """Look over this machine.

    Returns:
        1 where weft cannot run, else 0; and what is to be printed.
    """
    checks = check_machine()
    bad = any(check.state == "bad" for check in checks)
    if as_json:
        return int(bad), json.dumps([asdict(check) for check in checks])
    width = max(len(check.about) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:4} {check.about:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':4} {'':{width}}  -> {check.advice}")
    lines.append("weft cannot run as this is" if bad else "weft can run here")
    return int(bad), "\n".join(lines)
