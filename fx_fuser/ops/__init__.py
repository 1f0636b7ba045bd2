"""The composite ops that a match becomes: schemas, autograd, and the calls in the graph."""
