"""Methods, one file each."""

from .base import Policy
from .full import Full
from .random import RandomAttention
from .recency import Recency, StreamingLLM
from .registry import make_policy, option_names, policies, register

__all__ = [
    "Full",
    "Policy",
    "RandomAttention",
    "Recency",
    "StreamingLLM",
    "make_policy",
    "option_names",
    "policies",
    "register",
]
