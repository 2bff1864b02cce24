"""Where weft's own files lie: frames of weft's code are told from the user's by it."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))
