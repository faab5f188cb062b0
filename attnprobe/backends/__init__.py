"""Attention backends, one file each. `registry` finds them."""
