"""Penstock compared with its peers; see README.md. Not part of the package."""
