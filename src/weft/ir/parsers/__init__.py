"""Text of graphs, local programs and plans read back."""
