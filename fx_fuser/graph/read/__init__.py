"""What a graph says: canonical forms, values, regions, memory, and where anchors stand."""
