"""The folder of weft's own files: frames of weft's code are told from the user's by it."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))
