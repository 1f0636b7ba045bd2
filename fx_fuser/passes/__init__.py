"""Rewrites beside the fused sites: attention masks, plain gemms, operands of 16 bits."""
