"""Engines generate text: the protocol in ``base``, one wire per other file."""
