"""From a captured graph to a plan: one pass a file, `pipeline.py` in order."""
