"""Torch's tracing for all of capture: its private API, the user's lines of nodes, errors in the user's words."""
