"""Files that a policy reads belong to what a resumed comparison must share with its beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comparing import abacus_model, fake, fake_config  # noqa: F401 - fixtures
from kvkeep.calibration import Calibration
from kvkeep.evals.cli import carry_out
from kvkeep.rotary import Rotary

pytestmark = pytest.mark.usefixtures("fake")


def statistics(file: Path, seed: int) -> None:
    """A calibration of no model in particular: the fake engine asks for none."""
    made = torch.Generator().manual_seed(seed)
    real, imag = (torch.randn(2, 4, 4, generator=made) for _ in range(2))
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))
    absolute = torch.hypot(real, imag) + 0.1
    Calibration(real, imag, absolute, torch.zeros(2, 4, 0), rotary, (0, 1), 2, 300, "m", "f", "t").save(file)


def test_another_calibration_is_another_comparison(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "stats.safetensors"
    statistics(file, 0)
    config = fake_config(abacus_model, "full", f"triattention:calibration={file}")
    carry_out(config, tmp_path / "run", workers=0)
    carry_out(config, tmp_path / "run", workers=0)  # the same file: nothing to say
    statistics(file, 1)
    with pytest.raises(ValueError, match=r"was begun with another content of .*stats\.safetensors"):
        carry_out(config, tmp_path / "run", workers=0)
