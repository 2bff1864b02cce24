"""Dimensions that join several parts: where they go, and how they are stored in shares."""
