"""Values that a graph alone determines, without their elements."""
