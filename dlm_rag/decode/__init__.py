"""The denoising loop that retrieves, and its record."""
