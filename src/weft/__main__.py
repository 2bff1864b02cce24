"""`python -m weft` is the command `weft`."""

from __future__ import annotations

from weft.cli.main import app

if __name__ == "__main__":
    app()
