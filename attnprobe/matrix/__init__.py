"""The capability matrix: its structs, and how it is found, read, written and checked."""
