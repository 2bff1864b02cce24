"""Points of the space, planned one after the other, and what comes before that."""
