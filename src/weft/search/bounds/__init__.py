"""LowerBounds of points: seconds and bytes that no plan of them can do without."""
