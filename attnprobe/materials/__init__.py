"""Which builds of which libraries are installed: names, versions and digests."""
