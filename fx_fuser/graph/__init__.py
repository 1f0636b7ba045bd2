"""What is read from and written to FX graphs: anchors' sites, patterns, matches, grown tails."""
