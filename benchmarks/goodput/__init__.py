"""Goodput, as measured in a run with failures, beside what the simulator predicts of it."""
