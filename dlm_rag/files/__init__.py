"""Files as people hand them in, and files as this program leaves them."""
