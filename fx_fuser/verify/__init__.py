"""Fused sites against the model's own operations, in float64."""
