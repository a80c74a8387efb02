"""What a sink window costs in quality: SmolLM2-135M-Instruct's perplexity by position, to 8,192 tokens.

    python -m bench.window_quality [--documents alice pride_and_prejudice ...] [--head] [--report-only]

Real weights, the first 8,192 tokens of books in bench/data, full attention against windows: query t sees the
keys [0, S) and [t - W + 1, t], rotated at absolute positions as everywhere in the model. A document is one
forward pass of transformers' LlamaForCausalLM in bfloat16, the vocabulary's scores and the loss in float32.
Plain text, no token put before it; --head puts the server's own head before it, as in a conversation.
Each pass is written to the JSON at once, and one that is there is not run again: a killed run goes on.
--report-only writes the tables and the plot (which needs pip install -e '.[bench]'); only documents with all
configurations enter them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch.nn import functional

from bench.server_process import machine
from engine.models import bundles
from engine.models.prepare import prepare
from engine.models.smollm2_whisper import SmolLM2Whisper
from engine.models.text import TextCodec
from engine.types import TurnMode
from engine.vllm.environment import repair_torch_companions
from kernels.sink_window.reference import visible_mask

DATA, RESULTS = Path(__file__).parent / "data", Path(__file__).parent / "results"
CACHE = Path("~/.cache/metronome").expanduser()
DOCUMENTS = ("alice", "pride_and_prejudice", "opticks", "as_you_like_it", "paradise_lost")
WINDOWS, SINKS = (512, 1024), (0, 1, 4, 16, 64)
TOKENS, BUCKET, QUERY_BLOCK = 8192, 256, 256
BANDS = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096), (4096, 8192))

COLOURS = ("#c0392b", "#f0a030", "#2a8f5b", "#2d6fb3", "#7b4ea3")  # of SINKS
BEGIN, END = "<!-- tables: python -m bench.window_quality --report-only -->", "<!-- end of tables -->"

View = tuple[int | None, int]
"""(W, S); W None is full attention."""


def name_of(view: View) -> str:
    return "full" if view[0] is None else f"W={view[0]} S={view[1]}"


def sink_window_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    view: View,
    query_block: int = QUERY_BLOCK,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, [1, heads, tokens, head_size]: each block of queries against the keys it sees.

    The signature is transformers' attention interface; `view` and `query_block` come through its kwargs.
    """
    window, num_sinks = view
    outs, total = [], query.shape[2]
    for begin in range(0, total, query_block):
        end = min(begin + query_block, total)
        first = 0 if window is None else max(0, begin - window + 1)
        sinks = min(num_sinks, first)
        keys, values = (torch.cat((x[:, :, :sinks], x[:, :, first:end]), dim=2) for x in (key, value))
        positions = torch.cat((torch.arange(sinks), torch.arange(first, end)))
        mask = visible_mask(torch.arange(begin, end), positions, num_sinks, window)
        outs.append(
            functional.scaled_dot_product_attention(
                query[:, :, begin:end], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def load(directory: Path, attention: str, dtype: torch.dtype) -> Any:
    repair_torch_companions()
    from transformers import AttentionInterface, LlamaForCausalLM

    AttentionInterface.register("sink_window", sink_window_attention)
    model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.eval()


@torch.inference_mode()
def losses(model: Any, tokens: list[int], view: View) -> torch.Tensor:
    """Negative log-likelihood in nats of tokens[1:], each given all before it that `view` lets through."""
    hidden = model.model(torch.tensor([tokens[:-1]]), use_cache=False, view=view).last_hidden_state[0]
    weight, targets = model.lm_head.weight.float(), torch.tensor(tokens[1:])
    pieces = zip(hidden.split(512), targets.split(512), strict=True)
    return torch.cat([functional.cross_entropy(h.float() @ weight.T, t, reduction="none") for h, t in pieces])


@torch.inference_mode()
def check(directory: Path, tokens: list[int]) -> dict[str, float]:
    """The blocks against an explicit 4-D mask in transformers' eager attention; and what bfloat16 costs."""
    tokens = tokens[:1537]
    ours, eager = (load(directory, kind, torch.float32) for kind in ("sink_window", "eager"))
    worst = 0.0
    for view in ((None, 0), (64, 0), (64, 5), (100, 130), (256, 1), (1000, 4)):
        window, sinks = view
        mask = torch.full((300, 300), torch.finfo(torch.float32).min)
        for t in range(300):
            mask[t, : t + 1] = 0.0
            if window is not None:
                mask[t, sinks : max(sinks, t - window + 1)] = torch.finfo(torch.float32).min
        x = torch.tensor([tokens[:300]])
        expected = eager(x, attention_mask=mask[None, None], use_cache=False).logits
        got = ours(x, use_cache=False, view=view, query_block=37).logits
        worst = max(worst, float((got - expected).abs().max()))
    assert worst < 5e-3, f"logits differ from the explicit mask's by {worst}"
    exact = losses(ours, tokens, (512, 4))
    rounded = losses(load(directory, "sink_window", torch.bfloat16), tokens, (512, 4))
    return {
        "largest_logit_difference_from_explicit_mask": worst,
        "mean_nll_float32": float(exact.mean()),
        "mean_nll_bfloat16": float(rounded.mean()),
    }


@torch.inference_mode()
def attention_shares(directory: Path, tokens: list[int]) -> dict[str, float]:
    """Under full attention, the mean over heads: what share tokens 512-1,023 give to the first keys."""
    out = load(directory, "eager", torch.float32)(torch.tensor([tokens[:1024]]), output_attentions=True)
    by_key = torch.stack([layer[0, :, 512:].mean((0, 1)) for layer in out.attentions]).mean(0)
    spans = ((0, 1), (1, 4), (4, 16), (16, 64))
    return {f"keys {a}-{b - 1}": round(float(by_key[a:b].sum()), 4) for a, b in spans}


def measure(path: Path, documents: list[str], with_head: bool) -> None:
    """One pass per document and view that the file lacks."""
    directory = prepare(bundles.SMOLLM2, CACHE)
    family = SmolLM2Whisper(directory, prepare(bundles.WHISPER, CACHE))
    codec = TextCodec(directory / "tokenizer.json")
    head = [*family.head(""), *family.open_turn(TurnMode.MANUAL)] if with_head else []
    sinks = (0, 4, len(family.head(""))) if with_head else SINKS
    texts = {name: (DATA / f"{name}.txt").read_text() for name in documents}
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"documents": {}}
    if "check" not in result:
        about = machine() | {"transformers": version("transformers"), "dtype": "bfloat16, loss in float32"}
        first = next(iter(texts.values()))
        checked = check(directory, [*codec.encode(first)])
        result = {"machine": about, "bucket_tokens": BUCKET, "check": checked, "documents": {}}
        path.write_text(json.dumps(result, indent=1) + "\n")
    model = load(directory, "sink_window", torch.bfloat16)
    for name, text in texts.items():
        tokens = [*head, *codec.encode(text)][: TOKENS + 1]
        entry = result["documents"].setdefault(f"{name}, after the head" if with_head else name, {})
        entry |= {"sha256": hashlib.sha256(text.encode()).hexdigest(), "head_tokens": len(head)}
        if "attention_shares" not in entry:
            entry["attention_shares"] = attention_shares(directory, tokens)
        runs = entry.setdefault("mean_nll_by_bucket", {})
        for view in ((None, 0), *((window, s) for window in WINDOWS for s in sinks)):
            if name_of(view) in runs:
                continue
            begin = time.perf_counter()
            nll = losses(model, tokens, view).clone()  # out of inference mode
            nll[: max(0, len(head) - 1)] = float("nan")  # the head itself is not text to be judged
            runs[name_of(view)] = [round(float(x), 5) for x in nll.view(-1, BUCKET).nanmean(1)]
            entry.setdefault("seconds", {})[name_of(view)] = round(time.perf_counter() - begin, 1)
            path.write_text(json.dumps(result, indent=1) + "\n")
            late = sum(runs[name_of(view)][16:]) / 16
            print(f"{name} {name_of(view)}: {math.exp(late):.2f} past 4,096, {entry['seconds']}", flush=True)


def complete(result: dict[str, Any], with_head: bool = False) -> dict[str, dict[str, list[float]]]:
    """Document -> view -> mean loss by bucket, of the documents with every view."""
    documents = {n: e["mean_nll_by_bucket"] for n, e in result["documents"].items()}
    documents = {n: runs for n, runs in documents.items() if n.endswith("head") == with_head}
    most = max(map(len, documents.values()), default=0)
    return {n: runs for n, runs in documents.items() if len(runs) == most}


def band(by_bucket: list[float], start: int, stop: int) -> float:
    inside = by_bucket[start // BUCKET : stop // BUCKET]
    return sum(inside) / len(inside)


def tables(documents: dict[str, dict[str, list[float]]]) -> str:
    """By view and band: geometric mean over the books, and the ratio to full attention with its range."""
    top = "| | " + " | ".join(f"{start:,}-{stop:,}" for start, stop in BANDS) + " |\n" + "|---" * 6 + "|\n"
    perplexity, ratios = "", ""
    for view in next(iter(documents.values())):
        nll = [[band(runs[view], *b) for runs in documents.values()] for b in BANDS]
        full = [[band(runs["full"], *b) for runs in documents.values()] for b in BANDS]
        more = [[math.exp(x - f) for x, f in zip(*pair, strict=True)] for pair in zip(nll, full, strict=True)]
        perplexity += f"| {view} | " + " | ".join(f"{math.exp(fmean(x)):.2f}" for x in nll) + " |\n"
        spreads = [f" ({min(x):.3f} to {max(x):.3f})" * (max(x) - min(x) >= 5e-4) for x in more]
        cells = [f"{geometric_mean(x):.3f}{spread}" for x, spread in zip(more, spreads, strict=True)]
        if view != "full":
            ratios += f"| {view} | " + " | ".join(cells) + " |\n"
    return (
        f"Perplexity:\n\n{top}{perplexity}\nOver full attention's (least to most of books):\n\n{top}{ratios}"
    )


def plot(documents: dict[str, dict[str, list[float]]], out: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]  # pip install -e '.[bench]'

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), sharex=True, sharey="row", layout="constrained")
    edges = range(0, TOKENS + 1, BUCKET)

    def over_books(view: View) -> list[float]:
        runs = (by_view[name_of(view)] for by_view in documents.values())
        return [math.exp(fmean(bucket)) for bucket in zip(*runs, strict=True)]

    full = over_books((None, 0))
    for column, window in enumerate(WINDOWS):
        above, below = axes[0][column], axes[1][column]
        above.stairs(full, edges, baseline=None, color="black", lw=2.2, label="full attention")
        for i, (sinks, colour) in enumerate(zip(SINKS, COLOURS, strict=True)):
            ours, style = (
                over_books((window, sinks)),
                {"baseline": None, "color": colour, "lw": 2.6 - 0.4 * i},
            )
            above.stairs(ours, edges, **style, label=f"S = {sinks}")
            below.stairs([x / f for x, f in zip(ours, full, strict=True)], edges, **style)
        above.set(title=f"W = {window:,}", yscale="log", ylim=(18, 80), yticks=(20, 30, 50, 80))
        above.set_yticklabels(("20", "30", "50", "80"))
        above.minorticks_off()
        below.set(xlabel="position, tokens", xlim=(0, TOKENS), xticks=edges[::4], ylim=(0.98, 1.3))
        below.text(TOKENS - 100, 1.29, "S = 0 is above this scale", ha="right", va="top", color=COLOURS[0])
        for axis in (above, below):
            axis.axvline(window, color="grey", lw=1, ls=":")
            axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("perplexity (log scale)")
    axes[1][0].set_ylabel("perplexity over full attention's")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    title = f"SmolLM2-135M-Instruct, {len(documents)} books, means over {BUCKET} tokens"
    figure.suptitle(f"{title}; dotted: the window is full")
    figure.savefig(out, dpi=120)


def report(path: Path) -> None:
    """The plot, and the tables between the markers of the .md beside the JSON; the rest is by hand."""
    result = json.loads(path.read_text())
    documents, headed = complete(result), complete(result, with_head=True)
    text = f"## {len(documents)} books\n{tables(documents)}"
    if headed:
        text += f"\n## Behind the server's own head: {len(headed)} books\n{tables(headed)}"
    page = path.with_suffix(".md")
    before, _, rest = page.read_text().partition(BEGIN) if page.exists() else ("", "", END)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")
    plot(documents, path.with_suffix(".png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", nargs="+", default=list(DOCUMENTS))
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "window_quality.json")
    options = parser.parse_args()
    if not options.report_only:
        measure(options.out, options.documents, options.head)
    report(options.out)
