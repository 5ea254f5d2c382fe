"""Methods, one file each."""

from .base import Policy
from .full import Full
from .random import RandomAttention
from .recency import Recency, StreamingLLM
from .registry import make_policy, policies

__all__ = ["Full", "Policy", "RandomAttention", "Recency", "StreamingLLM", "make_policy", "policies"]
