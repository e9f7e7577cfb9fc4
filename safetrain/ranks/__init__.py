"""Several processes, one verdict: what ranks tell each other, how they keep in step, and who is missing when one does not answer.

Nothing here is used by a run of one process.
"""
