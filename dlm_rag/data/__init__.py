"""Questions, and (with training) the worlds and examples a denoiser learns from."""
