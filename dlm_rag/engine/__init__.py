"""The engine: questions in flight, their denoising steps, and the memory of keys and values."""
