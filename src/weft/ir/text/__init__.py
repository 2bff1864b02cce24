"""Text of graphs, local programs and plans: written, and read back to the same."""
