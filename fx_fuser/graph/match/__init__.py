"""Patterns, matches, grown tails, and a call in their place. Imports `graph.prepare` and `read`."""
