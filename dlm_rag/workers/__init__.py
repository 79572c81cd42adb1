"""Many processes that answer, one engine in each, and one that hands out and writes."""
