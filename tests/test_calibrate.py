"""``kvkeep calibrate``: means of real models' queries, the file they go into, and the authors' files."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import models as tiny_models
from kvkeep import calibration as files
from kvkeep.calibration import Calibration, convert
from kvkeep.hf.calibrate import calibrate
from kvkeep.hf.model import Unsupported, examine
from kvkeep.hf.rotary import facts
from kvkeep.policies import TriAttention
from kvkeep.signals import ModelFacts
from models import prompt, tiny
from test_cli import kvkeep
from test_load import tiny as tiny_folder  # noqa: F401 - a fixture

IDS = prompt(300)[0].tolist()


def made(kind: str) -> Any:
    """Models whose rotary positions are less usual."""
    values = tiny_models._common()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "partial":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            config = Phi3Config(**values, sliding_window=None, rope_parameters=rope, partial_rotary_factor=0.5)
            return Phi3ForCausalLM(config).eval()
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
        return LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope)).eval()


def queries_of(model: Any, ids: list[int]) -> list[Tensor]:
    """Queries before RoPE of each layer in float64 [T, H_q, D], from the outputs of the model's own modules."""
    found: dict[int, Tensor] = {}

    def keep(number: int, width: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            heads = model.config.num_attention_heads
            found[number] = output[0].flatten(1)[:, : heads * width].view(-1, heads, width).double()

        return hook

    handles = []
    for number, block in enumerate(model.model.layers):
        attention = block.self_attn
        module = next(
            m for name in ("q_norm", "q_proj", "qkv_proj") if (m := getattr(attention, name, None)) is not None
        )
        handles.append(module.register_forward_hook(keep(number, attention.head_dim)))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "partial", "yarn"])
def test_means_are_those_of_the_models_queries(name: str) -> None:
    model = made(name) if name in ("partial", "yarn") else tiny(name)
    found, wanted = calibrate(model, IDS, name=name, chunk=77), queries_of(model, IDS)
    pairs = found.rotary.pairs
    assert pairs == (2 if name == "partial" else found.width // 2)
    assert found.passing.shape[-1] == found.width - 2 * pairs
    assert (found.rotary.scaling != 1) == (name == "yarn")
    for i, queries in enumerate(wanted):
        mean = queries.mean(0)
        length = (queries[..., :pairs] ** 2 + queries[..., pairs : 2 * pairs] ** 2).sqrt().mean(0)
        assert torch.allclose(found.mu_real[i].double(), mean[:, :pairs], atol=2e-5)
        assert torch.allclose(found.mu_imag[i].double(), mean[:, pairs : 2 * pairs], atol=2e-5)
        assert torch.allclose(found.passing[i].double(), mean[:, 2 * pairs :], atol=2e-5)
        assert torch.allclose(found.absolute[i].double(), length, atol=2e-5)
        assert length.mean() > 0.1  # of a size that the tolerance would miss if it were wrong
    assert (found.layers, found.heads, found.tokens, found.model) == ((0, 1, 2), 2, 300, name)


def test_layers_that_never_evict_are_left_out() -> None:
    found = calibrate(tiny("gpt-oss", "eager"), IDS)
    assert found.layers == (1, 3)
    wanted = [queries_of(tiny("gpt-oss", "eager"), IDS)[i].mean(0) for i in (1, 3)]
    assert torch.allclose(found.mu_real.double(), torch.stack(wanted)[..., : found.rotary.pairs], atol=2e-5)


def test_chunks_do_not_matter_and_nothing_stays_behind() -> None:
    model, done = tiny("qwen3"), []
    whole = calibrate(model, IDS)
    parts = calibrate(model, IDS, chunk=64, report=done.append)
    assert done == [64, 128, 192, 256, 300]
    for name in ("mu_real", "mu_imag", "absolute"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name), atol=1e-5)
    assert whole.text == parts.text
    assert whole.text != calibrate(model, prompt(300, seed=1)[0].tolist()).text
    for block in model.model.layers:
        assert not block.self_attn._forward_hooks
        assert not block.self_attn._forward_pre_hooks
        assert type(block.self_attn.config) is type(model.config)


def test_wrong_texts_and_models() -> None:
    with pytest.raises(ValueError, match="has 255 tokens, too few"):
        calibrate(tiny("llama"), IDS[:255])
    with pytest.raises(ValueError, match="has 600 tokens, but the model was made for 512"):
        calibrate(tiny("llama"), IDS * 2)
    with pytest.raises(ValueError, match="chunk must be a whole number"):
        calibrate(tiny("llama"), IDS, chunk=0)
    model = made("yarn")
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(Unsupported, match="dynamic rotary"):
        calibrate(model, IDS)


# ---- the file -------------------------------------------------------------------------------------


@pytest.fixture
def found() -> Calibration:
    return calibrate(tiny("qwen3"), IDS, name="tiny qwen3")


def known(name: str = "qwen3") -> ModelFacts:
    return facts(examine(tiny(name)), rotary=True)


@pytest.mark.parametrize("name", ["qwen3", "partial", "yarn"])
def test_a_file_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny(name) if name == "qwen3" else made(name)
    one, path = calibrate(model, IDS, name=name), tmp_path / "deep" / "c.safetensors"
    one.save(path)
    other = files.load(path)
    for tensor in ("mu_real", "mu_imag", "absolute", "passing"):
        assert torch.equal(getattr(one, tensor), getattr(other, tensor))
    assert torch.equal(one.rotary.inv_freq, other.rotary.inv_freq)
    assert other.rotary.scaling == one.rotary.scaling
    for value in ("layers", "heads", "query_heads", "width", "tokens", "model", "fingerprint", "text"):
        assert getattr(one, value) == getattr(other, value)
    assert sorted(p.name for p in path.parent.iterdir()) == ["c.safetensors"]
    assert files.load(path) is other  # read once
    TriAttention(calibration=str(path)).check_model(facts(examine(model), rotary=True))
    with pytest.raises(ValueError, match="not for this model"):
        TriAttention(calibration=str(path)).check_model(known("llama-mqa"))


def test_a_changed_file_is_read_again_and_other_weights_are_refused(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    calibrate(tiny("llama"), IDS, name="llama").save(path)
    before = files.load(path)
    found.save(path)
    assert files.load(path).model == "tiny qwen3" != before.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        other = tiny_models.FAMILIES["qwen3"]().eval()
    with pytest.raises(ValueError, match="other weights"):
        files.load(path).refuse_other_model(facts(examine(other), rotary=True), str(path))


def test_a_write_that_fails_leaves_the_old_file(
    found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"old")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        found.save(path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_broken_files(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"

    def refused(says: str) -> None:
        with pytest.raises(ValueError, match=says):
            TriAttention(calibration=str(path))

    refused("there is no calibration")
    path.write_bytes(b"nonsense of some length")
    refused("not a calibration that kvkeep can use.*kvkeep calibrate MODEL TEXT")
    save_file({"weight": torch.zeros(3)}, path)
    refused("its schema is None, not 'kvkeep-triattention-1'")
    found.save(path)
    tensors = load_file(path)
    with files.safe_open(path, "pt") as file:
        metadata = file.metadata()

    def rewrite(change: dict[str, Tensor | None], **texts: str) -> None:
        values = {k: v.contiguous() for k, v in {**tensors, **change}.items() if v is not None}
        save_file(values, path, {**metadata, **texts})

    rewrite({"absolute": None})
    refused("it lacks 'absolute'")
    rewrite({"mu_real": tensors["mu_real"][:, :, 1:]})
    refused(r"mu_real must be float32 \[3, 4, 8\]")
    rewrite({"mu_real": tensors["mu_real"].half()})
    refused("mu_real must be float32")
    rewrite({"mu_real": tensors["mu_real"] * float("nan")})
    refused("not finite")
    rewrite({"mu_real": tensors["mu_real"] + 100})
    refused("longer than the mean length")
    rewrite({"inv_freq": tensors["inv_freq"].float()})
    refused("inv_freq must be float64")
    rewrite({}, layers="[0]")
    refused("mu_real must be float32")
    rewrite({}, heads="3")
    refused("cannot share 3 KV heads")
    rewrite({}, scaling="one")
    refused("not a calibration")
    rewrite({}, width="3")
    refused("16 wide, not 3")
    wrong = tmp_path / "stats.pt"
    wrong.write_bytes(b"")
    with pytest.raises(ValueError, match="kvkeep calibrate MODEL --convert"):
        TriAttention(calibration=str(wrong))


# ---- the authors' files ---------------------------------------------------------------------------


def theirs(found: Calibration) -> dict[str, Any]:
    names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
    tensors = (found.mu_real, found.mu_imag, found.absolute)
    stats = {
        f"layer{layer:02d}_head{h:02d}": {name: x[i, h].clone() for name, x in zip(names, tensors, strict=True)}
        for i, layer in enumerate(found.layers)
        for h in range(found.query_heads)
    }
    return {"metadata": {"rope_style": "half", "head_dim": found.width, "model_name": "tiny"}, "stats": stats}


def test_converted_statistics_are_the_same(found: Calibration, tmp_path: Path) -> None:
    torch.save(theirs(found), tmp_path / "stats.pt")
    other = convert(tmp_path / "stats.pt", known(), "tiny qwen3")
    for name in ("mu_real", "mu_imag", "absolute"):
        assert torch.equal(getattr(found, name), getattr(other, name))
    assert torch.equal(found.rotary.inv_freq, other.rotary.inv_freq)
    assert (other.fingerprint, other.text) == (found.fingerprint, "converted from stats.pt")


def test_malformed_statistics(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "stats.pt"

    def refused(data: Any, says: str) -> None:
        torch.save(data, path)
        with pytest.raises(ValueError, match=says):
            convert(path, known(), "m")

    with pytest.raises(ValueError, match="there is no file"):
        convert(path, known(), "m")
    path.write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match=r"stats\.pt"):
        convert(path, known(), "m")
    refused([1, 2], "no dictionary 'stats'")
    refused({"stats": {}}, "no dictionary 'stats'")
    refused({"stats": theirs(found)["stats"]}, "no dictionary 'metadata'")
    good = theirs(found)
    refused({**good, "metadata": {"rope_style": "interleaved"}}, "rope_style is 'interleaved'")
    refused({**good, "metadata": {"head_dim": 128}}, "heads are 128 wide, the model's 16")
    first = dict(good["stats"])
    last = first.pop("layer02_head03")
    refused({**good, "stats": first}, "lacks 1 of the model's heads, such as layer 2, head 3")
    refused({**good, "stats": {**first, "layer02_head04": last}}, "layer 2, head 4 is not in the model")
    refused({**good, "stats": {**first, "layer02_head03": last, "layer2_head3": last}}, "layer 2, head 3 comes twice")
    refused({**good, "stats": {**first, "head03": last}}, "'head03' is not of the form layer00_head00")
    refused({**good, "stats": {**first, "layer02_head03": {**last, "q_abs_mean": last["q_abs_mean"][1:]}}},
            "has no q_abs_mean of 8 numbers")  # fmt: skip
    refused({**good, "stats": {**first, "layer02_head03": {**last, "q_abs_mean": "8"}}}, "has no q_abs_mean")
    refused({**good, "stats": {**first, "layer02_head03": {**last, "q_abs_mean": last["q_abs_mean"] / 100}}},
            "longer than the mean length")  # fmt: skip
    torch.save(good, path)
    with pytest.raises(ValueError, match="rotates 4 of 8 components"):
        convert(path, facts(examine(made("partial")), rotary=True), "m")


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def test_a_file_that_would_run_code_is_refused(found: Calibration, tmp_path: Path) -> None:
    sprung, path = tmp_path / "sprung", tmp_path / "stats.pt"
    torch.save({**theirs(found), "metadata": Trap(str(sprung))}, path)
    with pytest.raises(ValueError, match="holds more than tensors and plain values, or is broken: it is not opened"):
        convert(path, known(), "m")
    path.write_bytes(pickle.dumps(Trap(str(sprung)), protocol=2))  # the old format, and no torch file at all
    with pytest.raises(ValueError, match=r"stats\.pt"):
        convert(path, known(), "m")
    assert not sprung.exists()
    pickle.loads(path.read_bytes())
    assert sprung.exists()  # it is a trap


# ---- the command ----------------------------------------------------------------------------------


def test_command(
    tiny_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "c.safetensors"
    text.write_text("the cat sat on a mat " * 100)
    words = ["calibrate", str(tiny_folder), str(text), "--out", str(out), "--tokens", "400", "--chunk", "150"]
    assert kvkeep(monkeypatch, *words) == 0
    said = capsys.readouterr()
    assert "the text has 600 tokens: the first 400 are taken" in said.err
    assert "2 layers, 2 query heads, 400 tokens" in " ".join(said.out.split())
    found = files.load(out)
    assert (found.tokens, found.model) == (400, str(tiny_folder))

    stats = tmp_path / "stats.pt"
    torch.save(theirs(found), stats)
    again = tmp_path / "again.safetensors"
    assert kvkeep(monkeypatch, "calibrate", str(tiny_folder), "--convert", str(stats), "--out", str(again)) == 0
    assert torch.equal(files.load(again).mu_real, found.mu_real)
    assert files.load(again).fingerprint == found.fingerprint


def test_a_text_that_the_tokenizer_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words that abacus has never seen")
    assert kvkeep(monkeypatch, "calibrate", "abacus", str(text), "--out", str(tmp_path / "c.safetensors")) == 2
    assert "abacus cannot read the text" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "there is no file"),
        ("", [], "is empty"),
        ("the cat", [], "2 tokens, too few"),
        ("the cat " * 300, ["--tokens", "10"], "--tokens 10: a mean needs at least 256"),
        ("the cat " * 300, ["--convert", "x.pt"], "either a TEXT"),
        ("the cat " * 300, ["--out", "c.pt"], "--out must end in .safetensors"),
        (b"\xff\xfe\xff", [], "is not UTF-8 text"),
    ],
)
def test_command_refuses_at_once(
    content: str | bytes | None,
    words: list[str],
    says: str,
    tiny_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = [] if "--out" in words else ["--out", str(tmp_path / "c.safetensors")]
    assert kvkeep(monkeypatch, "calibrate", str(tiny_folder), str(text), *out, *words) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("c.*"))


def test_statistics_of_layers_that_never_evict_are_not_needed(tmp_path: Path) -> None:
    """The authors' tool measures sliding-window layers too (their gpt-oss file); their numbers are not needed."""
    model = facts(examine(tiny("gpt-oss", "eager")), rotary=True)
    assert model.layers == (1, 3)
    made = torch.Generator().manual_seed(0)
    stats = {}
    for layer in range(4):
        for head in range(4):
            mean = torch.randn(2, 4, generator=made)
            stats[f"layer{layer:02d}_head{head:02d}"] = {
                "q_mean_real": mean[0], "q_mean_imag": mean[1], "q_abs_mean": mean.norm(dim=0) + 0.1
            }  # fmt: skip
    torch.save({"metadata": {"rope_style": "half", "head_dim": 8}, "stats": stats}, tmp_path / "stats.pt")
    found = convert(tmp_path / "stats.pt", model, "m")
    assert torch.equal(found.mu_real[0, 2], stats["layer01_head02"]["q_mean_real"])
    assert torch.equal(found.mu_real[1, 3], stats["layer03_head03"]["q_mean_real"])
    stats["layer04_head00"] = stats["layer03_head03"]
    torch.save({"metadata": {"rope_style": "half", "head_dim": 8}, "stats": stats}, tmp_path / "stats.pt")
    with pytest.raises(ValueError, match="layer 4, head 0 is not in the model, which has 4 layers of 4 query heads"):
        convert(tmp_path / "stats.pt", model, "m")


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "q_norm", "up_proj", "embed_tokens"])
def test_a_fingerprint_knows_every_kind_of_weight(part: str) -> None:
    """Fine-tuning may leave keys alone: what changes anywhere is another model, for a calibration at least."""
    model = copy.deepcopy(tiny("qwen3"))
    before = facts(examine(model), rotary=False).fingerprint()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight.mul_(1.5)
    assert facts(examine(model), rotary=False).fingerprint() != before
    assert facts(examine(model.to(torch.bfloat16)), rotary=False).fingerprint() != before
    assert facts(examine(copy.deepcopy(tiny("qwen3")).to(torch.bfloat16)), rotary=False).fingerprint() == before
