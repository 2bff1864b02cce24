"""What both planning and running ask of graphs and plans."""
