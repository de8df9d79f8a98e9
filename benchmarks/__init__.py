"""Penstock beside its peers: see README.md. Not a part of the package."""
