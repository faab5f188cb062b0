"""What is made from a matrix for somebody else: one format a file, found by `attnprobe export`."""
