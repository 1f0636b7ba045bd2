"""Rewrites beside the fused sites: attention, its masks, plain gemms, operands of 16 bits."""
