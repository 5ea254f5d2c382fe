"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .bench.cli import app as bench_app
from .calibrate_cli import calibrate
from .cli_options import read_options
from .demo import demo
from .evals.cli import compare
from .policies import policies as known_policies
from .report.files import check_writable, versions, write_json
from .report.tables import table
from .serve_cli import ServeCommand, serve
from .settings import Settings
from .testbed.cli import app as testbed_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Bounded KV caches for long reasoning: keep the prompt, the newest tokens and a fair draw of the rest.",
)
app.add_typer(bench_app, name="bench")
app.add_typer(testbed_app, name="testbed")
app.command()(compare)
app.command()(calibrate)
app.command()(demo)
app.command(cls=ServeCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(serve)
out, err = Console(), Console(stderr=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask. Quote it.")],
    model: Annotated[str, typer.Option(help="Hub id, local folder, or smollm2 (135M, made from a PyPI package).")] = (
        "smollm2"
    ),
    policy: Annotated[str, typer.Option(help="Which entries to keep; `kvkeep policies` lists them.")] = "random",
    budget: Annotated[int, typer.Option(help="Entries each KV head keeps, prompt included (K).")] = 2048,
    buffer: Annotated[
        int | None, typer.Option(help="Tokens between two eviction rounds, always kept (r). Default: 64.")
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(
            help="A prompt that does not fit: refused (total, the default), not counted (trace), grows K (grow)."
        ),
    ] = None,
    protect: Annotated[
        str | None, typer.Option(help="Never evicted: prompt, prompt:0.5, sinks:4, pin:10-20, none.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the policy, e.g. -o draw=layer.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="The schedule and protection of the policy's own paper.")
    ] = False,
    prefill_keep: Annotated[
        float | None, typer.Option(help="Compress the prompt once, after its prefill, to this share of it, e.g. 0.4.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws and of the sampling.")] = 0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if the model has one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens with this mass.")] = 1.0,
    stats_json: Annotated[Path | None, typer.Option(help="Write settings, text and cache statistics here.")] = None,
) -> None:
    """Generate text under a fixed KV budget, and say what the cache did."""
    from .engine import Sampling

    values: dict[str, Any] = {"seed": seed, "options": read_options(option or []), "prefill_keep": prefill_keep}
    values |= {k: v for k, v in {"buffer": buffer, "scope": scope, "protect": protect}.items() if v is not None}
    settings = Settings.published(policy, budget, **values) if published else Settings(policy, budget=budget, **values)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if not prompt.strip():
        raise ValueError("the prompt is empty: write what to ask, in quotes")
    check_writable(stats_json)

    from transformers import TextStreamer

    from .hf.engine import HFEngine
    from .hf.load import encode_prompt, load

    language_model, tokenizer = load(model)
    ids = encode_prompt(tokenizer, prompt, chat)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    engine = HFEngine(language_model, tokenizer, settings)
    sample = engine.generate([ids], [0], sampling, streamer=streamer)[0]
    stats = sample.stats
    err.print(
        f"[dim]{stats['policy']}: {stats['prompt']} prompt + {len(sample.tokens)} trace tokens, "
        f"{stats['rounds']} rounds, {stats['entries']} entries a head, "
        f"cache peak {stats['bytes']['peak'] / 2**20:.2f} MiB[/dim]"
    )
    if stats_json is not None:
        write_json(stats_json, {"model": model, "settings": settings.to_dict(), "versions": versions(),
                                "prompt": prompt, "text": sample.text, "tokens": len(sample.tokens),
                                "stats": stats})  # fmt: skip


@app.command()
def policies(json: JsonFile = None) -> None:
    """List the known methods: what they do, what they must see, what their paper protects."""
    check_writable(json)
    rows: list[dict[str, Any]] = [
        {
            "name": p.name,
            "rule": p.rule,
            "signals": sorted(p.signals),
            "published_protection": p.published_protection,
            "default_protection": p.default_protection,
            "published_schedule": p().schedule(2048),
            "paper": p.paper,
        }
        for p in known_policies().values()
    ]
    out.print(
        table(
            "Policies (default: what kvkeep protects unless --protect says otherwise)",
            ["name", "rule", "must see", "paper protects", "here"],
            [
                (
                    r["name"],
                    f"{r['rule']} [dim]{r['paper']}[/dim]",
                    ", ".join(r["signals"]) or "none",
                    r["published_protection"],
                    r["default_protection"],
                )
                for r in rows
            ],
        )
    )
    _maybe_write(json, {"versions": versions(), "seed": None, "rows": rows})


def _maybe_write(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, data)


def main() -> None:
    """Run the command line; a mistake of the user is one line, not a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        err.print(Text("error: ", style="bold red") + Text(str(error), style="default"), soft_wrap=True)
        sys.exit(2)
