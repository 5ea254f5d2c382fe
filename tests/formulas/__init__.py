"""Formulas of methods in plain loops, one file a method: what their policies are compared with."""
