"""The rules of legal graphs, local programs and plans, and the tables of them."""
