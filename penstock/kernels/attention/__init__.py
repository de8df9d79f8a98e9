"""Attention before it runs: sizes, plans, and the keys that name a plan. No torch, nothing specific to a backend."""
