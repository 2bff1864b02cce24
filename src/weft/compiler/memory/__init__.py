"""What a rank holds in memory when it holds most, read off its plan; and the limit on it."""
