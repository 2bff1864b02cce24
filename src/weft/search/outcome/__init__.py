"""The result of a search, and why not each other strategy."""
