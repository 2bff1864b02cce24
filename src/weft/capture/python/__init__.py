"""Values that a step reads of Python, and effects that Python has around it: watched, put back, or refused."""
