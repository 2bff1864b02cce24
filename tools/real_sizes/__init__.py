"""Plans of real models at published sizes, without running them, beside the closed formulas of textbooks."""
