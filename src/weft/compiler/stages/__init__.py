"""Pipelines: which stage runs each call, and the graphs of the stages."""
