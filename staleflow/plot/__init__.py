"""``staleflow plot``: how well runs have learned and how stale their data was, as a picture.

Data flow: run folder -> :mod:`staleflow.plot.curve` (what there is to draw) -> :mod:`staleflow.plot.drawing`.
"""
