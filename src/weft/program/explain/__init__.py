"""The text of `Program.explain`: exchanges, memory, limits."""
