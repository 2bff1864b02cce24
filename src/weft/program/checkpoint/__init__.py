"""Checkpoints: what a program holds, in files, each tensor once, and back into any layout."""
