"""What was fused, what was not, and why: text, tables and HTML."""
