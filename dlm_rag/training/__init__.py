"""Training a denoiser of our own: tokenizer, objective, loop."""
