"""Edits before matching, put back where nothing was fused. Imports `graph.read`, not `match`."""
