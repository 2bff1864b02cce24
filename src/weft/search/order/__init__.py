"""The order in which points are planned: estimates of them, better with each that is looked at."""
