"""Which backend computes a site, measured: candidates, timing, the gate of growth."""
