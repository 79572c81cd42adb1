"""Training rows: from invented worlds, from questions of one's own, from documents."""
