"""Seams into what people train with: one file a host. Importing this package imports no host."""
