"""Rewrites of the captured graph that keep what it computes: equal graphs that lay out better."""
