"""One rank's view of a graph: local shapes, boxing as collectives, overlap and offload."""
