"""Reads and rewrites FX graphs: `read` first, then `prepare`, `attention` and `match`."""
