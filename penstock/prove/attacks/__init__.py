"""Attacks on a real server, by theme: tables of what is sent and of the answer that is right (`table` has all)."""
