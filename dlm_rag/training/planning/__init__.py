"""What a run takes, before it begins: bytes, FLOPs, seconds."""
