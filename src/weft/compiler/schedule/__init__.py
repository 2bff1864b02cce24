"""From local programs to plans: buckets, segments, registers and credits, priorities, orders."""
