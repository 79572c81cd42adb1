"""Invented worlds: passages, questions, and the way to every answer."""
