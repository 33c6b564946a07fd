"""``staleflow bench``: what the core costs on this machine.

::

    plan -> ledgers, queues, trajectories, rust -> figures -> tables, JSON, plot

Every part measures staleflow and its baselines in turns and yields :class:`~staleflow.bench.result.Figure` records with
all raw samples. Nothing here decides whether a figure is good; nothing in staleflow depends on this package.
"""
