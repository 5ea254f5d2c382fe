"""Methods, one file each."""

from .base import Policy, shared_axes
from .beaconkv import BeaconKV
from .expected import ExpectedAttention
from .full import Full
from .h2o import H2O
from .infokv import InfoKV
from .keys import KeyDiff, Knorm
from .lagkv import LagKV
from .mix import Mix
from .pyramidkv import PyramidKV
from .random import RandomAttention
from .recency import Recency, StreamingLLM
from .registry import make_policy, option_names, policies, register
from .rkv import RKV
from .rpc import RPC
from .snapkv import SnapKV
from .tova import TOVA
from .triattention import TriAttention
from .vase import VaSE
from .vase_dkv import VaSEDKV

__all__ = [
    "H2O",
    "RKV",
    "RPC",
    "TOVA",
    "BeaconKV",
    "ExpectedAttention",
    "Full",
    "InfoKV",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "Mix",
    "Policy",
    "PyramidKV",
    "RandomAttention",
    "Recency",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "VaSE",
    "VaSEDKV",
    "make_policy",
    "option_names",
    "policies",
    "register",
    "shared_axes",
]
