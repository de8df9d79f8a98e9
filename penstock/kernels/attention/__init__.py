"""Attention before it runs: sizes, plans and the keys that name a plan. No torch, and nothing of a backend's habits."""
