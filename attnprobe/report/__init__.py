"""Ways to show a matrix, one file each."""
