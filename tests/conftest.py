"""What every test gets."""

from __future__ import annotations

import pytest

from kvkeep.policies import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that a test registers are known only while it runs."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
