"""Weights between hosts: the wire that a parameter server and those who pull from it have in common."""
