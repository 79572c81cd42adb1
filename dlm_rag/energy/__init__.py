"""Energy: joules by the machine's own sensors; where there is none, the reason and no figure."""
