"""Strategies to what they take, here and in processes that plan ahead what the search is about to ask for."""
