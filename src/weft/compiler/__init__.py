"""From a captured graph to a plan: a folder for each idea, `pipeline.py` says in which order passes run."""
