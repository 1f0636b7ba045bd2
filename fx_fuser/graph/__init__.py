"""Reading and rewriting FX graphs, in three rooms: `read`, then `prepare`, then `match`."""
