"""What a step reads of Python, and what Python does around it: watched, put back, or refused."""
