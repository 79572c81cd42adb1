"""Diffusion as mathematics: commit rules (and, with training, schedules, two kinds of noise, the loss)."""
