"""What `python -m benchmarks.search_bench` measures of `weft.search`, a module for each part."""
