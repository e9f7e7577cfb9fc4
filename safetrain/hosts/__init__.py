"""Guards for the user's own loop: it keeps its forward, backward and step, and every update is judged before it is
applied."""
