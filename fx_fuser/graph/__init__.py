"""Reading and rewriting FX graphs, in rooms: `read`, then `prepare`, `attention` and `match`."""
