"""What a comparison must know of a model before it is loaded: tokenizer, context, identity, caveat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ..hf import load as hf_load

hf: Any = transformers
#: Beside a checkpoint: ``{"caveat": "..."}`` ends every reading of results with it.
CARD = "kvkeep_model.json"


@dataclass(frozen=True)
class Model:
    """A model that was found but not loaded.

    Attributes:
        name: as the user wrote it.
        tokenizer: its tokenizer.
        context: positions it was made for; None if its config does not say.
        identity: sha256 of each weights file (a local folder) or the commit (hub), and of the config.
        caveat: what its results must not be used to claim; "" if its folder says nothing.
    """

    name: str
    tokenizer: Any
    context: int | None
    identity: dict[str, str]
    caveat: str = ""


def find_model(name: str) -> Model:
    """Tokenizer and identity of a model, without its weights in memory.

    Raises:
        ValueError: there is no such model, or it has no tokenizer.
    """
    source, safe = hf_load.locate(name)
    config = hf_load.causal_config(name, source, safe)
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(source, padding_side="left", **safe)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the tokenizer of {name}: {error}") from error
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    folder = Path(source)
    if not folder.is_dir():
        return Model(name, tokenizer, context, {"commit": str(getattr(config, "_commit_hash", None))})
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return Model(name, tokenizer, context, {file.name: _sha256(file) for file in files}, _caveat(folder / CARD))


def _caveat(card: Path) -> str:
    if not card.is_file():
        return ""
    try:
        return str(json.loads(card.read_text()).get("caveat", ""))
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{card} is not a JSON object: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
