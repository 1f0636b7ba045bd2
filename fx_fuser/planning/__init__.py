"""Which backend runs a site, measured: candidates, timing, the gate of grown tails."""
