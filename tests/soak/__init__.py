"""Proofs that take minutes, each a command of the Makefile."""
