"""``kvkeep calibrate``: the file that TriAttention may be given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .report.files import check_writable

if TYPE_CHECKING:
    from .calibration import Calibration

out, err = Console(), Console(stderr=True)


def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id, local folder, or a name such as smollm2 or abacus.")],
    file: Annotated[Path, typer.Option("--out", help="The .safetensors file to write.")],
    text: Annotated[Path | None, typer.Argument(help="Plain text to measure on, UTF-8.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text at most.")] = 32768,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a forward; less takes less memory.")] = 2048,
    convert: Annotated[
        Path | None, typer.Option(help="Statistics of the authors' tool (.pt) to convert instead of measuring.")
    ] = None,
) -> None:
    """Measure a model's mean queries for -o calibration=FILE of the policy triattention."""
    if (text is None) == (convert is None):
        raise ValueError("give either a TEXT to measure on or --convert STATS.pt")
    if file.suffix != ".safetensors":
        raise ValueError(f"--out must end in .safetensors, got {file}")
    source = text or convert
    if source is not None and not source.is_file():
        raise ValueError(f"there is no file {source}")
    words = "" if text is None else _read(text)
    check_writable(file)
    found = _measured(model, words, tokens, chunk) if convert is None else _converted(model, convert)
    found.save(file)
    out.print(
        f"{file}: {len(found.layers)} layers, {found.query_heads} query heads, "
        + (f"{found.tokens} tokens" if convert is None else f"converted from {convert}"),
        highlight=False,
    )


def _read(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not words.strip():
        raise ValueError(f"{path} is empty: give a text of a few thousand words")
    return words


def _measured(name: str, words: str, tokens: int, chunk: int) -> Calibration:
    from .hf.calibrate import LEAST, calibrate, longest_text
    from .hf.load import load

    model, tokenizer = load(name)
    encode: Any = tokenizer
    try:
        ids = list(encode(words, verbose=False)["input_ids"])
    except Exception as error:  # the tokenizers library has no class of its own for them
        raise ValueError(f"{name} cannot read the text: {error}. Give a text in the model's own words") from error
    most = min(tokens, longest_text(model) or tokens)
    if most < LEAST:
        raise ValueError(f"--tokens {tokens}: a mean needs at least {LEAST} (the model reads {longest_text(model)})")
    if len(ids) < LEAST:
        raise ValueError(f"the text has {len(ids)} tokens, too few for a mean: give at least {LEAST}")
    if len(ids) > most:
        err.print(f"[dim]the text has {len(ids)} tokens: the first {most} are taken[/dim]")
    ids = ids[:most]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("tokens", total=len(ids))
        return calibrate(model, ids, name=name, chunk=chunk, report=lambda n: bar.update(task, completed=n))


def _converted(name: str, stats: Path) -> Calibration:
    from .calibration import convert
    from .hf.load import load
    from .hf.model import examine
    from .hf.rotary import facts

    model, _ = load(name)
    return convert(stats, facts(examine(model), rotary=True), name)
