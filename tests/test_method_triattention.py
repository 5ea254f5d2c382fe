"""TriAttention: golden vectors of the authors' code, the formula in plain loops, and identities of its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digests import Past, rotating, yarn
from formulas.triattention import Statistics, raw, triattention
from kvkeep.calibration import Calibration
from kvkeep.policies import TriAttention, make_policy
from kvkeep.policies.triattention import standardised
from kvkeep.rotary import Rotary
from kvkeep.settings import Settings
from kvkeep.signals import DIGEST, LayerView, ModelFacts, RoundView
from kvkeep.testing import Entries, Made, check_policy

GOLDEN = json.loads((Path(__file__).parent / "golden" / "triattention.json").read_text())
MODES = {"per_head": "head-of-all-layers", "per_layer": "head", "global": "model"}


# ---- the authors' numbers -------------------------------------------------------------------------


def wave(shape: tuple[int, ...], step: float, start: float) -> np.ndarray:
    count = int(np.prod(shape))
    return np.sin(step * np.arange(count) + start).astype(np.float32).astype(np.float64).reshape(shape)


class Given:
    """The golden file's inputs."""

    L, H, KV, S, D = (GOLDEN[name] for name in ("L", "H", "KV", "S", "D"))
    F = D // 2
    rotary = Rotary(1e4 ** (-torch.arange(F, dtype=torch.float64) / F))
    keys = wave((L, KV, S, D), 0.73, 0.1)
    mean = wave((L, H, F), 0.51, 0.2) + 1j * wave((L, H, F), 0.37, 0.9)
    length = np.abs(mean) + 0.25 * np.abs(wave((L, H, F), 0.91, 0.4))
    positions = torch.tensor(GOLDEN["positions"])

    @classmethod
    def calibration(cls, **changes: Any) -> Calibration:
        values: dict[str, Any] = {
            "mu_real": torch.from_numpy(cls.mean.real).float(),
            "mu_imag": torch.from_numpy(cls.mean.imag).float(),
            "absolute": torch.from_numpy(cls.length).float(),
            "passing": torch.zeros(cls.L, cls.H, 0),
            "rotary": cls.rotary,
            "layers": tuple(range(cls.L)),
            "heads": cls.KV,
            "tokens": 0,
            "model": "golden",
            "fingerprint": "f",
            "text": "",
        }
        return Calibration(**{**values, **changes})

    @classmethod
    def view(cls, start: int = GOLDEN["round_start"], shift: int = 0, order: list[int] | None = None) -> RoundView:
        """One row; ``order``: which key lies in which slot; ``shift`` moves everything in time."""
        slots = torch.arange(cls.S) if order is None else torch.tensor(order)
        at = (cls.positions + shift)[slots].expand(1, cls.KV, -1)

        def layer(i: int) -> LayerView:
            keys = cls.rotary.rotate(torch.from_numpy(cls.keys[i])[None].float(), (cls.positions + shift)[None, None])
            everything = torch.ones(1, 1, cls.S, dtype=torch.bool)
            return LayerView(
                keys=keys[:, :, slots], positions=at.int(), filled=everything, window=~everything,
                order=at.argsort(-1), places=torch.arange(cls.S).expand(1, cls.KV, -1), index=i,
                eligible=everything, rotary=cls.rotary,
            )  # fmt: skip

        zero = torch.zeros(1, dtype=torch.int64)
        return RoundView(0, zero, zero, torch.arange(cls.L), torch.arange(cls.KV), cls.KV, cls.S, layer=layer,
                         seen=(start + shift,))  # fmt: skip


@pytest.fixture(scope="module")
def golden_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("calibration") / "golden.safetensors"
    Given.calibration().save(path)
    return str(path)


def kept(scores: Tensor) -> list[Any]:
    return scores.topk(GOLDEN["keep"]).indices.sort(-1).values.tolist()


@pytest.mark.parametrize(("aggregate", "key"), [("mean", "raw_mean"), ("max", "raw_max")])
def test_the_formula_gives_the_golden_scores(aggregate: str, key: str) -> None:
    """The authors' float32 angles are off by up to 4e-3 at a distance of 65536; with theirs the digits agree."""
    inv_freq = Given.rotary.inv_freq.numpy()
    offsets = [2**n for n in range(17)]
    exact, theirs = [], []
    for i in range(Given.L):
        for h in range(Given.H):
            mean, length = Given.mean[i, h], Given.length[i, h]
            for s, position in enumerate(GOLDEN["positions"]):
                wanted = GOLDEN[key][i * Given.H + h][s]
                k = Given.keys[i, h // (Given.H // Given.KV), s]
                turned = Given.rotary.rotate(torch.from_numpy(k), torch.tensor(position)).double().numpy()
                found = raw(turned, position, GOLDEN["round_start"], (mean, length, np.zeros(0)), inv_freq, 1.0,
                            offsets, aggregate)  # fmt: skip
                exact.append(abs(found - wanted))
                theirs.append(abs(float32_angles(k, mean, length, position, aggregate) - wanted))
    assert max(exact) < (5e-4 if aggregate == "mean" else 5e-3)
    assert max(theirs) < 2e-5


def float32_angles(k: np.ndarray, mean: np.ndarray, length: np.ndarray, position: int, aggregate: str) -> float:
    z = k[: Given.F] + 1j * k[Given.F :]
    distance = (GOLDEN["round_start"] - position + 2 ** np.arange(17)).astype(np.float32)[:, None]
    inv_freq = Given.rotary.inv_freq.float().numpy()
    phase = distance * inv_freq + np.angle(mean * np.conj(z)).astype(np.float32)
    scores = (np.abs(mean) * np.abs(z) * np.cos(phase.astype(np.float64)) + (length - np.abs(mean)) * np.abs(z)).sum(1)
    return float(scores.max() if aggregate == "max" else scores.mean())


def test_golden_scores_and_kept_sets(golden_file: str) -> None:
    per_head = TriAttention(calibration=golden_file).score(Given.view())
    assert torch.allclose(per_head[0, 0], torch.tensor(GOLDEN["agg_per_head"]), atol=1e-3)
    assert kept(per_head[0, 0]) == [sorted(x) for x in GOLDEN["keep_per_head"]]
    per_layer = TriAttention(calibration=golden_file, mode="per_layer").score(Given.view())
    assert torch.allclose(per_layer[0], torch.tensor(GOLDEN["agg_per_layer_per_head"]), atol=1e-3)
    assert kept(per_layer[0]) == [[sorted(x) for x in layer] for layer in GOLDEN["keep_per_layer_per_head"]]
    one = TriAttention(calibration=golden_file, mode="global").score(Given.view())
    assert kept(one[0, 0, 0]) == sorted(GOLDEN["keep_union"])
    zscores = torch.tensor(GOLDEN["zscore"]).view(Given.L, Given.KV, -1, Given.S)
    assert torch.allclose(per_layer[0], zscores.amax(2), atol=1e-3)
    raw_mean = torch.tensor(GOLDEN["raw_mean"]).view(1, 1, -1, Given.S)
    there = torch.ones(1, 1, 1, Given.S, dtype=torch.bool)
    assert torch.allclose(standardised(raw_mean, there).view(-1, Given.S), torch.tensor(GOLDEN["zscore"]), atol=1e-4)


def test_golden_maximum_over_distances(golden_file: str) -> None:
    found = TriAttention(calibration=golden_file, mode="per_layer", aggregate="max").score(Given.view())
    wanted = np.array(GOLDEN["raw_max"])
    wanted = (wanted - wanted.mean(1, keepdims=True)) / wanted.std(1, keepdims=True)
    assert np.allclose(found[0].numpy(), wanted.reshape(Given.L, Given.KV, -1, Given.S).max(2), atol=2e-2)


# ---- the formula ----------------------------------------------------------------------------------


def own_statistics(past: Past, row: list[list[Entries]], rotary: Rotary) -> Statistics:
    """Means of a row's queries, from the queries themselves."""
    length, pairs = row[0][0].query_positions[-1] + 1, rotary.pairs
    found = []
    for heads in past.of[length]:
        found.append([])
        for queries in heads:
            queries = queries[: past.prompt(length)]
            z = queries[:, :pairs] + 1j * queries[:, pairs : 2 * pairs]
            found[-1].append((z.mean(0), np.abs(z).mean(0), queries[:, 2 * pairs :].mean(0)))
    return found


@pytest.mark.parametrize("options", [{}, {"mode": "per_layer"}, {"mode": "global"}, {"aggregate": "max"},
                                     {"offset_max": 100}, {"offset_max": 1, "mode": "per_layer"}])  # fmt: skip
def test_the_prompts_own_means(options: dict[str, Any]) -> None:
    policy = TriAttention(**options)
    past = Past(policy)

    def reference(row: Any) -> Any:
        rotary = Made([9], width=row[0][0].queries.shape[-1]).rotary
        return triattention(row, own_statistics(past, row, rotary), rotary.inv_freq.numpy(), **options)

    found = check_policy(policy, reference, prepare=past)
    assert found.near <= found.compared / 200


@pytest.mark.parametrize("pairs", [4, 3, 2])
def test_a_file_with_scaling_and_partial_rotation(pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets that the file's frequencies, scaling and passing components decide."""
    rng, rotary, (L, H, G, D) = np.random.default_rng(3), yarn(8, pairs), (2, 2, 3, 8)
    mean = rng.normal(size=(L, H * G, pairs)) + 1j * rng.normal(size=(L, H * G, pairs))
    length = np.abs(mean) * (1 + rng.random(mean.shape))
    passing = rng.normal(size=(L, H * G, D - 2 * pairs))
    path = tmp_path / "c.safetensors"
    Calibration(*(torch.from_numpy(x).float() for x in (mean.real, mean.imag, length, passing)),
                rotary, (0, 1), H, 5, "m", "f", "t").save(path)  # fmt: skip
    statistics = [[(mean[i, h], length[i, h], passing[i, h]) for h in range(H * G)] for i in range(L)]

    rotating(monkeypatch, lambda width: rotary)
    for options in ({}, {"aggregate": "max"}, {"mode": "per_layer"}):
        policy = TriAttention(calibration=str(path), **options)  # type: ignore[arg-type]

        def reference(row: Any, options: Any = options) -> Any:
            return triattention(row, statistics, rotary.inv_freq.numpy(), rotary.scaling, **options)

        found = check_policy(policy, reference, [{"lengths": [60, 9, 31]}])
        assert found.near <= found.compared / 50  # two candidates are one deviation off the mean each, and tie


# ---- identities -----------------------------------------------------------------------------------


def test_later_in_time_and_other_slots_change_nothing(golden_file: str) -> None:
    policy = TriAttention(calibration=golden_file, mode="per_layer")
    plain = policy.score(Given.view())
    assert torch.allclose(policy.score(Given.view(shift=5000)), plain, atol=2e-4)
    assert torch.allclose(policy.score(Given.view(order=[3, 1, 2, 0, 11, 10, 9, 4, 5, 6, 7, 8])), plain, atol=1e-5)
    assert not torch.allclose(policy.score(Given.view(start=60)), plain, atol=1e-2)  # time itself does


def test_without_means_norms_rank_and_with_nothing_else_the_mean_query_does(tmp_path: Path) -> None:
    zero, path = torch.zeros(Given.L, Given.H, Given.F), tmp_path / "c.safetensors"
    Given.calibration(mu_real=zero, mu_imag=zero).save(path)
    found = TriAttention(calibration=str(path), mode="per_layer").score(Given.view())
    z = np.abs(Given.keys[..., : Given.F] + 1j * Given.keys[..., Given.F :])  # [L, KV, S, F]
    norms = np.einsum("lkgf,lksf->lkgs", Given.length.reshape(Given.L, Given.KV, -1, Given.F), z)
    norms = (norms - norms.mean(-1, keepdims=True)) / norms.std(-1, keepdims=True)
    assert np.allclose(found[0], norms.max(2), atol=1e-4)

    Given.calibration(absolute=torch.from_numpy(np.abs(Given.mean)).float() * (1 + 1e-6)).save(path)
    found = TriAttention(calibration=str(path), mode="per_layer", offset_max=1).score(Given.view())
    mean = torch.from_numpy(np.concatenate([Given.mean.real, Given.mean.imag], -1))
    query = Given.rotary.rotate(mean, torch.tensor(GOLDEN["round_start"] + 1)).view(Given.L, Given.KV, -1, Given.D)
    keys = torch.stack([Given.view().layer(i).keys[0] for i in range(Given.L)])  # type: ignore[misc]
    logits = query @ keys.transpose(-1, -2)
    logits = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True, correction=0)
    assert torch.allclose(found[0], logits.amax(2), atol=1e-4)


def test_the_union_of_each_heads_best_is_the_maximum() -> None:
    """The authors' step: the best k of each head, then the best k of their union by their maximum."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        z, k = rng.normal(size=(rng.integers(1, 9), 30)), int(rng.integers(1, 30))
        top = z.max(0)
        union = sorted({int(i) for head in z for i in np.argsort(-head)[:k]}, key=lambda i: -top[i])[:k]
        assert set(union) == {int(i) for i in np.argsort(-top)[:k]}


def test_heads_of_a_shard_take_their_own_statistics(golden_file: str) -> None:
    policy = TriAttention(calibration=golden_file, mode="per_layer")
    view = Given.view()

    def second(i: int) -> LayerView:
        layer = view.layer(i)  # type: ignore[misc]
        return replace(layer, keys=layer.keys[:, 1:], positions=layer.positions[:, 1:], order=layer.order[:, 1:],
                       places=layer.places[:, 1:])  # fmt: skip

    shard = replace(view, heads=torch.tensor([1]), layer=second)
    assert torch.allclose(policy.score(shard), policy.score(view)[:, :, 1:], atol=1e-6)


def test_sums_do_not_depend_on_blocks() -> None:
    queries, at = torch.randn(2, 6, 40, 8), torch.arange(40).expand(2, -1)
    policy = TriAttention()
    whole, state = policy.digest(None, queries, at), None
    for start in range(0, 40, 7):
        state = policy.digest(state, queries[:, :, start : start + 7], at[:, start : start + 7])
    assert torch.allclose(state, whole, atol=1e-4)  # type: ignore[arg-type]
    assert whole.shape == (2, 6, 8 + 4 + 1)
    assert (whole[..., -1] == 40).all()


# ---- options and models ---------------------------------------------------------------------------


def facts(**changes: Any) -> ModelFacts:
    values = {"layers": (0, 1), "heads": 2, "query_heads": 4, "width": 8, "rotary": Given.rotary}
    return ModelFacts(**{**values, "fingerprint": lambda: "f", **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": (0, 1, 2)}, r"layers \(0, 1\), not \(0, 1, 2\)"),
        ({"heads": 1}, "KV heads 2, not 1"),
        ({"query_heads": 8}, "query heads 4, not 8"),
        ({"width": 16}, "width 8, not 16"),
        ({"rotary": Rotary(Given.rotary.inv_freq * 1.01)}, "other rotary frequencies"),
        ({"rotary": Rotary(Given.rotary.inv_freq, 1.2)}, "other rotary frequencies or another scaling"),
        ({"rotary": None}, "other rotary"),
        ({"fingerprint": lambda: "g"}, "other weights"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], says: str, golden_file: str) -> None:
    policy = TriAttention(calibration=golden_file)
    policy.check_model(facts())
    with pytest.raises(ValueError, match=f"made for golden, not for this model: it has {says}"):
        policy.check_model(facts(**changes))


def test_a_partly_rotating_model_needs_a_file() -> None:
    TriAttention().check_model(facts())
    with pytest.raises(ValueError, match="rotates only 6 of 8 components"):
        TriAttention().check_model(facts(rotary=yarn(8, 3)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "head"}, "mode must be per_head or per_layer or global"),
        ({"aggregate": "sum"}, "aggregate must be mean or max"),
        ({"offset_max": 0}, "offset_max must be a whole number"),
        ({"offset_max": True}, "offset_max must be a whole number"),
        ({"calibration": 3}, "calibration is the path"),
        ({"calibration": "no/such.safetensors"}, "there is no calibration no/such.safetensors"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TriAttention(**options)


def test_description(golden_file: str) -> None:
    policy = make_policy("triattention", {"calibration": golden_file})
    assert DIGEST in TriAttention().signals
    assert DIGEST not in policy.signals  # no query needs to be seen
    for mode, scope in MODES.items():
        assert make_policy("triattention", {"mode": mode}).scope == scope
    budget = Settings(policy="triattention", budget=2048, **policy.schedule(2048)).make_budget()
    assert budget is not None
    assert (budget.every, budget.window) == (128, 0)
    assert Settings.of(policy, budget=2048).make_policy() == policy
