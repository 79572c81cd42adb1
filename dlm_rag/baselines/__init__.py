"""Autoregressive models behind OpenAI-style servers: what reviewers compare with."""
