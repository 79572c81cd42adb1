"""Serving: questions over HTTP, answered together by one engine."""
