"""One rank at run time: queues, the work of its actors, its variables."""
