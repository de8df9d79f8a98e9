"""Attacks on a real server, by theme: tables of what is sent and of the correct answers (`table` has all of them)."""
