"""The denoiser, its attention, and the public checkpoints it reads."""
