"""``kvkeep serve``: vLLM's OpenAI-compatible server with a bounded cache."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from .cli_options import read_options
from .policies import option_names
from .vllm.config import KEY, Refused, Serving, runnable
from .vllm.versions import Installed, installed

out, err = Console(), Console(stderr=True)

#: Largest block that is chosen: smaller ones share more of a common prompt, larger ones gain nothing more.
_LARGEST_BLOCK = 128
#: The server's module, the same in all distributions: `vllm serve` looks for a distribution named vllm.
_SERVER = "vllm.entrypoints.openai.api_server"
#: What only `vllm serve` does.
_MANY_FRONT_ENDS = (
    "--headless", "--api-server-count", "-asc", "--grpc", "--data-parallel-multi-port-external-lb", "-dpm",
    "--data-parallel-hybrid-lb", "-dph",
)  # fmt: skip
#: Which of vLLM's two model runners; on GPUs it takes the second unless this is 0.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
#: What `kvkeep serve` takes as an option of its own.
_SETTINGS = (
    "policy", "budget", "buffer", "window", "align", "scope", "protect", "seed", "admission", "max_prompt",
    "block_size",
)  # fmt: skip
_FLAGS = "kvkeep.flags"


class ServeCommand(TyperCommand):
    """Keeps what follows ``--`` apart, for vLLM; names the policies that run here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the words at the first ``--``."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_FLAGS] = args[cut + 1 :]
        return super().parse_args(ctx, args[:cut])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Look for the policies only now: other packages bring some, which may be broken."""
        option: Any = next(parameter for parameter in self.params if parameter.name == "policy")
        able = ", ".join(name for name in runnable() if name != "full")
        option.help = f"Which entries to keep: {able}; or full, which evicts nothing."
        super().format_help(ctx, formatter)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, local folder, or a name such as smollm2.")],
    policy: Annotated[str, typer.Option(help="Which entries to keep.")] = "random",
    budget: Annotated[
        int | None,
        typer.Option(
            help="Entries each KV head keeps, prompt included (K), e.g. 2048. Required, except with --policy full.",
            show_default=False,
        ),
    ] = None,
    buffer: Annotated[int | None, typer.Option(help="Tokens between two eviction rounds (r). Default: 64.")] = None,
    window: Annotated[
        int | None, typer.Option(min=0, help="Newest entries that are always kept (w). Default: as many as --buffer.")
    ] = None,
    align: Annotated[
        int | None,
        typer.Option(help="Budgets that depend on the prompt are rounded up to a multiple of this. Default: 1."),
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(help="A prompt that does not fit grows K (grow, the default) or is not counted (trace)."),
    ] = None,
    protect: Annotated[str | None, typer.Option(help="Never evicted: prompt, prompt:0.5, sinks:4, none.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="Option of the policy, e.g. -o draw=layer.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws. Default: 0.")] = None,
    admission: Annotated[
        str | None,
        typer.Option(help="A request takes blocks as it grows (grow, the default) or all at once (reserve)."),
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest prompt that clients send, if the pool is small.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Slots of a block. Default: the largest that wastes none.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with a bounded cache; vLLM's own flags go after --.

    kvkeep serve Qwen/Qwen3-8B --budget 2048 -- --max-model-len 32768 --port 8000
    """
    _refuse_strays(context)
    values: dict[str, Any] = {"policy": policy, "options": read_options(option or [])}
    _refuse_misplaced(policy, values["options"])
    named = {"budget": budget, "buffer": buffer, "window": window, "align": align, "scope": scope, "protect": protect,
             "seed": seed, "admission": admission, "max_prompt": max_prompt}  # fmt: skip
    values |= {name: value for name, value in named.items() if value is not None}
    if not values["options"]:
        del values["options"]
    serving = Serving.parse(values)  # what is wrong here is wrong without vLLM, too
    vllm = installed()
    command = server_command(model, values, context.meta[_FLAGS], block_size, vllm)
    variables = server_variables(serving, vllm)
    line = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
    if not serving.policy.evicts:
        err.print(Text(f"note: policy {policy} evicts nothing: the server keeps vLLM's full cache"), soft_wrap=True)
    if dry_run:
        print(line)
        return
    err.print(Text(f"running: {line}"), soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **variables})  # signals and the exit code are the server's


def server_command(
    model: str, values: dict[str, Any], flags: Sequence[str], block_size: int | None, vllm: Installed
) -> list[str]:
    """The command that starts the server.

    Args:
        model: hub id, folder, or a name of kvkeep's own.
        values: what goes into ``additional_config["kvkeep"]``.
        flags: vLLM's own flags.
        block_size: slots of a block; None chooses.
        vllm: the installed distribution.

    Raises:
        ValueError: the settings are wrong, cannot be served, or clash with a flag; says what to do.
    """
    serving = Serving.parse(values)
    _refuse_flags(flags)
    config, rest = _additional_config(flags)
    if KEY in config:
        raise ValueError(f'--additional-config has a "{KEY}" already: use either that or the options of `kvkeep serve`')
    path, name = _located(model)
    command = [sys.executable, "-m", _SERVER, "--model", path]
    if name is not None and not _values_of("--served-model-name", rest):
        command += ["--served-model-name", name]
    size = _block_size(serving, block_size, rest, 32 if _on_cpu(vllm) else 16)
    if size is not None:
        command += ["--block-size", str(size)]
    return [*command, "--additional-config", json.dumps({**config, KEY: values}), *rest]


def server_variables(serving: Serving, vllm: Installed) -> dict[str, str]:
    """Environment variables that the server needs beside this process's own.

    Args:
        serving: the settings.
        vllm: the installed distribution.

    Raises:
        Refused: a variable is set to what kvkeep does not run on; says what to do.
    """
    if not serving.policy.evicts:
        return {}
    given = os.environ.get(_RUNNER)
    if given is not None and given.strip() != "0":
        raise Refused(
            f"{_RUNNER}={given} asks for vLLM's model runner V2, which kvkeep does not run on yet: unset it, or set it "
            "to 0"
        )
    return {} if vllm.is_cpu else {_RUNNER: "0"}  # vLLM for CPUs takes the first by itself


# ---- what the user got wrong ------------------------------------------------------------------------


def _refuse_strays(context: typer.Context) -> None:
    if not context.args:
        return
    known = [name for parameter in context.command.params for name in parameter.opts]
    stray = next((word for word in context.args if word.startswith("-")), context.args[0])
    near = difflib.get_close_matches(stray.partition("=")[0], known, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"{stray} is no option of `kvkeep serve`: {hint}vLLM's own flags go after --, such as "
        "`kvkeep serve MODEL --budget 2048 -- --max-model-len 32768`"
    )


def _refuse_misplaced(policy: str, options: dict[str, Any]) -> None:
    """Settings of kvkeep that were given as options of the policy."""
    for name, value in options.items():
        if name.replace("-", "_") in _SETTINGS and name not in option_names(policy):
            raise ValueError(
                f"{name} is not an option of policy {policy!r}, but of `kvkeep serve`: write "
                f"--{name.replace('_', '-')} {value} instead of -o {name}={value}"
            )


def _refuse_flags(flags: Sequence[str]) -> None:
    if _values_of("--model", flags) or (flags and not flags[0].startswith("-")):
        raise ValueError("the model is the argument of `kvkeep serve`: leave it out after --")
    if dotted := [f for f in flags if re.match(r"--additional[-_]config\.", f)]:
        raise ValueError(f"{dotted[0]}: write --additional-config as one JSON object")
    if many := [f for f in flags if f.partition("=")[0].replace("_", "-") in _MANY_FRONT_ENDS]:
        raise Refused(
            f"{many[0]} needs `vllm serve`, which is not the server that `kvkeep serve` starts: leave it out, or run "
            f"`vllm serve` with --additional-config '{{\"{KEY}\": ...}}' as --dry-run shows it"
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvkeep" not in plugins.split(","):
        raise ValueError(f"VLLM_PLUGINS={plugins} keeps vLLM from loading kvkeep: add kvkeep to it, or unset it")


# ---- flags ------------------------------------------------------------------------------------------


def _values_of(flag: str, flags: Sequence[str]) -> list[str]:
    """Values given to a flag; vLLM takes underscores for dashes."""
    found = []
    for i, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found.append(value if equals else (flags[i + 1] if i + 1 < len(flags) else ""))
    return found


def _additional_config(flags: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The user's --additional-config and the flags without it."""
    given = _values_of("--additional-config", flags)
    if not given:
        return {}, list(flags)
    try:
        config = json.loads(given[-1])
    except json.JSONDecodeError as error:
        raise ValueError(f"--additional-config must be a JSON object, got {given[-1]!r}: {error}") from error
    if not isinstance(config, dict) or len(given) > 1:
        raise ValueError(f"--additional-config must be one JSON object, got {' and '.join(given)}")
    at = next(i for i, f in enumerate(flags) if f.partition("=")[0].replace("_", "-") == "--additional-config")
    return config, [*flags[:at], *flags[at + (1 if "=" in flags[at] else 2) :]]


def _block_size(serving: Serving, asked: int | None, flags: Sequence[str], supported: int) -> int | None:
    """The block size to pass, checked; None if the user passed one, or nothing depends on it."""
    given = _values_of("--block-size", flags)
    if given and asked is not None:
        raise ValueError("--block-size is given twice, before and after --: leave one out")
    if given and not given[-1].isdecimal():
        raise ValueError(f"--block-size must be a number of slots, got {given[-1]!r}")
    size = int(given[-1]) if given else asked
    if size is None and serving.policy.evicts:
        size = serving.best_block_size(supported, _LARGEST_BLOCK)
    if size is None:
        return None
    if size < 1 or size % supported:
        raise ValueError(f"--block-size must be a multiple of {supported} here, got {size}")
    if serving.policy.evicts:
        serving.check_block_size(size, supported)
    return None if given else size


# ---- this machine -----------------------------------------------------------------------------------


def _on_cpu(vllm: Installed) -> bool:
    if vllm.is_cpu:
        return True
    import torch

    return not torch.cuda.is_available()


def _located(model: str) -> tuple[str, str | None]:
    """What vLLM gets for the model, and the name to serve it under if that is not what the user wrote."""
    from .testbed import checkpoints

    if model != "smollm2" and checkpoints.folder(model) is None:
        return model, None
    from .hf.load import locate

    return locate(model)[0], model
