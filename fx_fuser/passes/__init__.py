"""Rewrites besides the fused sites: attention, its masks, plain gemms, 16-bit operands."""
