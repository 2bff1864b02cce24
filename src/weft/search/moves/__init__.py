"""Local search: moves from one strategy to the next, chains of them, and the proof that none improves the best."""
