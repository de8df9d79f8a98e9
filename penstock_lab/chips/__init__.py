"""Simulated chips that compute a placement with real numbers (docs/planning.md, "Placements that compute")."""
