"""Optimizers in capture: the update of one parameter."""
