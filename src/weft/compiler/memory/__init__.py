"""The memory that a rank holds when it holds most, read off its plan; and the limit on it."""
