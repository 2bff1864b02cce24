"""Stand-ins for numbers of Python, for the time of a capture."""
