"""Abacus: a tiny reasoning model, its tasks and its training."""
