"""Evidence in front of a canvas: how it is laid out, what fits, what is kept of it."""
