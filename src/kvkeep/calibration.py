"""What TriAttention must know of a model's queries: the file it lies in, and the authors' own files converted to it.

Engine-neutral: :mod:`kvkeep.hf.calibrate` measures it, :class:`kvkeep.policies.TriAttention` reads it.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .report.files import write_bytes
from .rotary import Rotary
from .signals import ModelFacts

SCHEMA = "kvkeep-triattention-1"
_TEXTS = ("model", "fingerprint", "text")  # metadata of the file, beside numbers
_TENSORS = ("mu_real", "mu_imag", "absolute", "inv_freq")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Means over a text of each query head's queries before RoPE; L layers, H_q query heads, F pairs of D components.

    Attributes:
        mu_real: float32 [L, H_q, F], mean of component f.
        mu_imag: float32 [L, H_q, F], mean of component f + F.
        absolute: float32 [L, H_q, F], mean length of the pair.
        passing: float32 [L, H_q, D - 2F], mean of the components that are not rotated.
        rotary: how the model rotates.
        layers: global numbers of the L layers.
        heads: KV heads of a layer.
        tokens: of the text.
        model: its name.
        fingerprint: hash of its weights.
        text: SHA-256 of the text's token ids, or what stands for it.

    Raises:
        ValueError: shapes do not fit together, or a number is not finite or impossible.
    """

    mu_real: Tensor
    mu_imag: Tensor
    absolute: Tensor
    passing: Tensor
    rotary: Rotary
    layers: tuple[int, ...]
    heads: int
    tokens: int
    model: str
    fingerprint: str
    text: str

    def __post_init__(self) -> None:
        shape = (len(self.layers), self.query_heads, self.rotary.pairs)
        for name in ("mu_real", "mu_imag", "absolute"):
            found: Tensor = getattr(self, name)
            if found.shape != shape or found.dtype != torch.float32:
                raise ValueError(f"{name} must be float32 {list(shape)}, got {found.dtype} {list(found.shape)}")
        if self.passing.shape[:-1] != shape[:-1] or self.passing.dtype != torch.float32:
            raise ValueError(f"passing must be float32 {list(shape[:-1])} and one axis more")
        if 0 in shape or self.heads < 1 or self.query_heads % self.heads:
            raise ValueError(f"{self.query_heads} query heads cannot share {self.heads} KV heads in {shape[0]} layers")
        everything = (self.mu_real, self.mu_imag, self.absolute, self.passing, self.rotary.inv_freq)
        if not all(bool(x.isfinite().all()) for x in everything):
            raise ValueError("a number is not finite")
        if bool((torch.hypot(self.mu_real, self.mu_imag) > self.absolute * (1 + 1e-3) + 1e-6).any()):
            raise ValueError("a mean is longer than the mean length, which cannot be")

    @property
    def query_heads(self) -> int:
        """H_q."""
        return self.mu_real.shape[1]

    @property
    def width(self) -> int:
        """D."""
        return 2 * self.rotary.pairs + self.passing.shape[-1]

    def refuse_other_model(self, model: ModelFacts, path: str) -> None:
        """Refuse a model that this does not describe.

        Raises:
            ValueError: with what differs and what to do.
        """
        ours = {"layers": self.layers, "KV heads": self.heads, "query heads": self.query_heads, "width": self.width}
        theirs = {"layers": model.layers, "KV heads": model.heads, "query heads": model.query_heads,
                  "width": model.width}  # fmt: skip
        different = [f"{name} {ours[name]}, not {theirs[name]}" for name in ours if ours[name] != theirs[name]]
        if not different and (model.rotary is None or not same_rotation(self.rotary, model.rotary)):
            different = ["other rotary frequencies or another scaling"]
        if not different and self.fingerprint != model.fingerprint():
            different = ["other weights"]
        if different:
            raise ValueError(
                f"calibration {path} was made for {self.model or 'another model'}, not for this model: it has "
                f"{'; '.join(different)}. Make one with `kvkeep calibrate MODEL TEXT --out FILE.safetensors`."
            )

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file; a reader sees the old one or the new one, never half of it."""
        tensors = {name: getattr(self, name).detach().cpu().contiguous().clone() for name in _TENSORS[:3]}
        tensors["inv_freq"] = self.rotary.inv_freq.detach().cpu().contiguous()
        if self.passing.shape[-1]:
            tensors["passing"] = self.passing.detach().cpu().contiguous()
        numbers = {"layers": list(self.layers), "query_heads": self.query_heads, "heads": self.heads,
                   "width": self.width, "tokens": self.tokens, "scaling": self.rotary.scaling}  # fmt: skip
        metadata = {"schema": SCHEMA, **{name: getattr(self, name) for name in _TEXTS}}
        data = save(tensors, metadata | {name: json.dumps(value) for name, value in numbers.items()})
        write_bytes(path, data)


def same_rotation(one: Rotary, other: Rotary) -> bool:
    """Whether two models rotate alike, up to the float32 that frequencies are computed in."""
    if one.pairs != other.pairs or abs(one.scaling - other.scaling) > 1e-6 * abs(other.scaling):
        return False
    return torch.allclose(one.inv_freq, other.inv_freq, rtol=1e-5, atol=0.0)


def load(path: str | Path) -> Calibration:
    """Read a file that :meth:`Calibration.save` wrote; the same file is read once.

    Raises:
        ValueError: there is no such file, or it is not a calibration; the message says what to do.
    """
    place = Path(path).expanduser()
    try:
        stamp = place.stat()
    except OSError as error:
        raise ValueError(f"there is no calibration {path}: make it with `kvkeep calibrate`, or see {error}") from error
    return _load(str(place.resolve()), stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=8)
def _load(path: str, changed: int, size: int) -> Calibration:
    wrong = f"{path} is not a calibration that kvkeep can use: "
    advice = ". Make one with `kvkeep calibrate MODEL TEXT --out FILE.safetensors`"
    if path.endswith((".pt", ".pth", ".bin")):
        raise ValueError(f"{wrong}convert it with `kvkeep calibrate MODEL --convert {path} --out FILE.safetensors`")
    try:
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in (*_TENSORS, "passing") if name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{wrong}{error}{advice}") from error
    if metadata.get("schema") != SCHEMA:
        raise ValueError(f"{wrong}its schema is {metadata.get('schema')!r}, not {SCHEMA!r}{advice}")
    try:
        numbers = {name: json.loads(metadata[name]) for name in ("layers", "heads", "width", "tokens", "scaling")}
        if tensors["inv_freq"].dtype != torch.float64 or tensors["inv_freq"].dim() != 1:
            raise ValueError("inv_freq must be float64 [F]")
        if tensors["mu_real"].dim() != 3:
            raise ValueError("mu_real must have the axes layer, query head, pair")
        found = Calibration(
            tensors["mu_real"],
            tensors["mu_imag"],
            tensors["absolute"],
            tensors.get("passing", tensors["mu_real"].new_zeros(*tensors["mu_real"].shape[:2], 0)),
            Rotary(tensors["inv_freq"], float(numbers["scaling"])),
            tuple(int(i) for i in numbers["layers"]),
            int(numbers["heads"]),
            int(numbers["tokens"]),
            *(metadata[name] for name in _TEXTS),
        )
        if found.width != numbers["width"]:
            raise ValueError(f"its tensors are {found.width} wide, not {numbers['width']}")
    except KeyError as error:
        raise ValueError(f"{wrong}it lacks {error}{advice}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wrong}{error}{advice}") from error
    return found


# ---- the authors' files --------------------------------------------------------------------------

_KEY = re.compile(r"layer(\d+)_head(\d+)")
_FIELDS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def convert(path: str | Path, facts: ModelFacts, model: str) -> Calibration:
    """Read statistics that the authors' tool wrote with ``torch.save``, without running anything that a file says.

    They carry no frequencies and no hash of the weights: both are those of the model they are said to be of.

    Args:
        path: the .pt file.
        facts: the model it was made from.
        model: that model's name.

    Raises:
        ValueError: the file is missing, malformed, wants to run code, or is of another model.
    """
    wrong, rotary = f"{path} is not a statistics file of TriAttention's code: ", facts.rotary
    if rotary is None:
        raise ValueError("converting statistics needs to know how the model rotates")
    if 2 * rotary.pairs != facts.width:
        raise ValueError(
            f"the model rotates {2 * rotary.pairs} of {facts.width} components, which TriAttention's tool cannot "
            "measure: run `kvkeep calibrate MODEL TEXT --out FILE.safetensors` instead"
        )
    try:
        data = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and plain values, or is broken: it is not opened") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong}{error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("stats"), dict) or not data["stats"]:
        raise ValueError(f"{wrong}it has no dictionary 'stats'")
    _check_metadata(data.get("metadata"), facts, wrong)
    found = {name: torch.zeros(len(facts.layers), facts.query_heads, rotary.pairs) for name in _FIELDS}
    missing = {(layer, head) for layer in facts.layers for head in range(facts.query_heads)}
    for key, values in data["stats"].items():
        match = _KEY.fullmatch(key) if isinstance(key, str) else None
        if match is None or not isinstance(values, dict):
            raise ValueError(f"{wrong}{key!r} is not of the form layer00_head00")
        place = (int(match[1]), int(match[2]))
        if place[0] < facts.depth and place[0] not in facts.layers:
            continue  # a layer that never evicts (sliding window): the authors' tool measures all
        if place[0] not in facts.layers or place[1] >= facts.query_heads:
            raise ValueError(
                f"{wrong}layer {place[0]}, head {place[1]} is not in the model, which has "
                f"{facts.depth or 'other'} layers of {facts.query_heads} query heads"
            )
        if place not in missing:
            raise ValueError(f"{wrong}layer {place[0]}, head {place[1]} comes twice")
        missing.remove(place)
        for name in _FIELDS:
            value = values.get(name)
            if not isinstance(value, Tensor) or value.shape != (rotary.pairs,) or not value.is_floating_point():
                raise ValueError(f"{wrong}{key} has no {name} of {rotary.pairs} numbers, one a frequency of the model")
            found[name][facts.layers.index(place[0]), place[1]] = value.float()
    if missing:
        layer, head = min(missing)
        raise ValueError(f"{wrong}it lacks {len(missing)} of the model's heads, such as layer {layer}, head {head}")
    try:
        return Calibration(
            mu_real=found["q_mean_real"],
            mu_imag=found["q_mean_imag"],
            absolute=found["q_abs_mean"],
            passing=torch.zeros(len(facts.layers), facts.query_heads, 0),
            rotary=rotary,
            layers=facts.layers,
            heads=facts.heads,
            tokens=0,  # the authors' file does not say
            model=model,
            fingerprint=facts.fingerprint(),
            text=f"converted from {Path(path).name}",
        )
    except ValueError as error:
        raise ValueError(f"{wrong}{error}") from error


def _check_metadata(metadata: Any, facts: ModelFacts, wrong: str) -> None:
    if not isinstance(metadata, dict):
        raise ValueError(f"{wrong}it has no dictionary 'metadata'")
    if (style := metadata.get("rope_style", "half")) != "half":
        raise ValueError(f"{wrong}its rope_style is {style!r}; kvkeep pairs components half by half ('half')")
    if (width := metadata.get("head_dim", facts.width)) != facts.width:
        raise ValueError(f"{wrong}its heads are {width} wide, the model's {facts.width}")
