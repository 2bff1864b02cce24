"""Ops that capture takes apart or replaces, so that results do not depend on layouts."""
