"""What a graph says: canonical forms, values, regions, memory, and where the anchors are."""
