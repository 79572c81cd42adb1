"""Masked diffusion as mathematics: commit rules (and, with training, schedules and the loss)."""
