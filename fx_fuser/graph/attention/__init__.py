"""Attention in a graph, as a description. Imports `graph.read` and `graph.prepare.reindex`."""
