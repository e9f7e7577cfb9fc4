"""Loops that are not ours: the loop keeps its forward, backward and step, and every update is judged before it is applied."""
