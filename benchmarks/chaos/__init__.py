"""Faults at moments drawn at random, in real runs on real processes, and what must be true after each."""
