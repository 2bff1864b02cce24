"""What is legal in graphs, local programs and plans: tables of rules, and the rules."""
