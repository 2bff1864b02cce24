"""The user's step as one fx graph, and from there to a logical graph."""
