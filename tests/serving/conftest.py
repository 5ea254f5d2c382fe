"""Tests of the vLLM engine: real vLLM on the CPU, tiny models; what needs no vLLM runs everywhere.

`make test-vllm` sets KVKEEP_REQUIRE_VLLM, so that a broken installation fails there instead of skipping.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

torch.set_num_threads(1)  # two spinning threads of each of two workers would share two cores
# Before vLLM is imported: engines in this process, a small pool, no spinning threads of two workers on two cores.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

INSTALLED = importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm").origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that are marked `vllm` where it is not installed."""
    if INSTALLED:
        return
    if os.environ.get("KVKEEP_REQUIRE_VLLM"):
        raise pytest.UsageError("KVKEEP_REQUIRE_VLLM is set and vLLM is not installed: run `make test-vllm`")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="needs vLLM: run `make test-vllm`"))
