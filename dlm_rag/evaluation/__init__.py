"""Scores of rollouts: answers against gold, evidence against support, work per answer."""
