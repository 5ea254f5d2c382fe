"""Put what was measured of each method into its page, between ``<!-- measured -->`` and ``<!-- /measured -->``.

python benchmarks/methods.py           # from compare/{protection,once,once-smollm2}.json and round-policies-cpu.json
python benchmarks/methods.py --check   # exit 1 if a page differs from the recorded numbers

The tables of docs/methods/measured.md are made the same way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pivot import number, span, table

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "methods"
#: Page -> policies that it describes.
METHODS = {
    "random": ["random"], "streaming": ["recency"], "h2o": ["h2o"], "tova": ["tova"], "snapkv": ["snapkv"],
    "pyramidkv": ["pyramidkv"], "expected": ["expected"], "rkv": ["rkv"], "vase": ["vase"], "vase-dkv": ["vase-dkv"],
    "triattention": ["triattention"], "rpc": ["rpc"], "infokv": ["infokv"], "beaconkv": ["beaconkv"],
    "keydiff": ["keydiff"], "knorm": ["knorm"], "lagkv": ["lagkv"], "mix": ["mix"],
}  # fmt: skip
MODELS = ("abacus-base", "abacus-attention")
START, END = "<!-- measured -->", "<!-- /measured -->"


def read(name: str) -> dict[str, Any]:
    """A recorded file."""
    data: dict[str, Any] = json.loads((HERE / name).read_text())
    return data


def score(cell: dict[str, Any]) -> str:
    """An accuracy with its interval."""
    return f"{number(cell['value'])} {span(cell['low'], cell['high'])}"


def cells(data: dict[str, Any], policy: str, protect: str) -> dict[str, dict[str, Any]]:
    """Model -> the cell of a policy under a protection."""
    return {
        c["model"]: c
        for c in data["cells"]
        if c["policy"].partition(":")[0] == policy and c["protect"] == protect and c["budget"] is not None
    }


def rounds(data: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    """Recorded rounds of a policy, its variants included."""
    return [row for row in data["rows"] if row["policy"].partition(":")[0] == policy]


def told(policy: str, recorded: dict[str, dict[str, Any]]) -> list[str]:
    """Lines about one policy."""
    found = []
    on, off = (cells(recorded["protection"], policy, protect) for protect in ("prompt", "none"))
    if on:
        name = next(iter(on.values()))["policy"]
        both = "; ".join(f"`{m}` {score(on[m])}, without protection {score(off[m])}" for m in MODELS)
        found.append(f"`{name}` on abacus (n = 12, r2, 2x, 100 problems), prompt protected: {both}.")
    once, real = (cells(recorded[name], policy, "prompt") for name in ("once", "once-smollm2"))
    if once:
        both = ", ".join(f"`{m}` {score(once[m])}" for m in MODELS)
        line = f"A passcode noted once in the trace, asked for at its end (2x, 200 problems): {both}"
        if real:
            line += f"; SmolLM2, 1,000 tokens of prose, K = 512, 8 problems: {score(real['smollm2'])}"
        found.append(line + ".")
    for row in rounds(recorded["rounds"], policy):
        low, high = row["over_random_interval"]
        cost = f"`{row['policy']}`: a round costs {row['over_random']:.3g} [{low:.3g}, {high:.3g}] times random's"
        if row["between_ms"]:
            cost += f", with what is observed between rounds {row['both_over_random']:.3g}"
        share = f"{row['extra_share']:.1%}"
        found.append(f"{cost}; extra memory {share} of the entries (K = 2048, r = 64, one CPU thread).")
    return found


def pages(recorded: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Each page as it should be."""
    made = {}
    for page, policies in METHODS.items():
        path = PAGES / f"{page}.md"
        text = path.read_text()
        before, _, rest = text.partition(START)
        after = rest.partition(END)[2] if END in rest else rest
        lines = [line for policy in policies for line in told(policy, recorded)]
        body = "\n".join(f"- {line}" for line in lines)
        see = "Measured ([commands and all methods](measured.md)); intervals 95%:"
        made[path] = f"{before}{START}\n{see}\n\n{body}\n{END}{after}"
    path = PAGES / "measured.md"
    before, _, rest = path.read_text().partition(START)
    made[path] = before + START + "\n" + summary(recorded) + END + rest.partition(END)[2]
    return made


def summary(recorded: dict[str, dict[str, Any]]) -> str:
    """One row a policy: accuracy both ways, the passcode, the cost of a round."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for policy in dict.fromkeys(p for policies in METHODS.values() for p in policies):
        on, off = (cells(recorded["protection"], policy, protect) for protect in ("prompt", "none"))
        once, real = (cells(recorded[name], policy, "prompt") for name in ("once", "once-smollm2"))
        if not on:
            continue
        row = rows.setdefault((next(iter(on.values()))["policy"],), {})
        for model in MODELS:
            row[f"{model}, protected"], row[f"{model}, not"] = score(on[model]), score(off[model])
            row[f"once, {model}"] = score(once[model])
        if real:
            row["once, SmolLM2"] = score(real["smollm2"])
    rows = {("full cache",): full_row(recorded), **rows}
    accuracy = [f"{model}, {side}" for model in MODELS for side in ("protected", "not")]
    passcodes = [*(f"once, {model}" for model in MODELS), "once, SmolLM2"]
    costs: dict[tuple[str, ...], dict[str, str]] = {}
    for row in recorded["rounds"]["rows"]:
        low, high = row["over_random_interval"]
        costs[(row["policy"],)] = {
            "round, ms": f"{row['round_ms']:.3g}", "/ random": f"{row['over_random']:.3g} [{low:.3g}, {high:.3g}]",
            "between rounds, ms": f"{row['between_ms']:.3g}" if row["between_ms"] else "-",
            "both / random": f"{row['both_over_random']:.3g}", "extra memory": f"{row['extra_share']:.1%}",
            "peak of temporaries, MiB": f"{row['temporary_bytes'] / 2**20:.3g}",
        }  # fmt: skip
    parts = [
        "### Accuracy on abacus", table(["policy"], rows, accuracy),
        "### A passcode said once", table(["policy"], rows, passcodes),
        "### A round", table(["policy"], costs, list(next(iter(costs.values())))),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def full_row(recorded: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The full cache, where a protection means nothing."""
    full = {name: {c["model"]: c for c in recorded[name]["cells"] if c["budget"] is None}
            for name in ("protection", "once", "once-smollm2")}  # fmt: skip
    row = {f"{m}, protected": score(full["protection"][m]) for m in MODELS}
    row |= {f"once, {m}": score(full["once"][m]) for m in MODELS}
    return row | {"once, SmolLM2": score(full["once-smollm2"]["smollm2"])}


def main() -> int:
    """Write the pages, or compare them."""
    recorded = {name: read(f"compare/{name}.json") for name in ("protection", "once", "once-smollm2")}
    recorded["rounds"] = read("round-policies-cpu.json")
    stale = 0
    for path, text in pages(recorded).items():
        if path.read_text() == text:
            continue
        stale += 1
        if "--check" in sys.argv:
            print(f"{path.name} differs from the recorded numbers: run python benchmarks/methods.py")
        else:
            path.write_text(text)
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
