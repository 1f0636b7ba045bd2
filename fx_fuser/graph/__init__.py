"""Reading and rewriting FX graphs: anchors' sites, patterns, matches, grown tails."""
