"""Questions that both planning and running ask of graphs and plans."""
