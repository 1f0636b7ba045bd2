"""Fused sites compared with the model's own operations and float64."""
