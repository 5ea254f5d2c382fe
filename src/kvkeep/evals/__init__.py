"""Run policies on tasks and say what the results can and cannot tell apart."""
