"""Measure a folder written by train_tiny_glm.py and write its model card (README.md).

    python examples/models/tiny-glm-python/measure.py [FOLDER]

Every number in the card comes from here or from the folder's training.json. The checkpoint is
measured as stored (bf16 weights), computing in float32, on the held-out files.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
import train_tiny_glm as tiny  # noqa: E402
from modeling import Pass, TinyGlm  # noqa: E402

Numbers = dict[str, Any]


def load(folder: Path) -> tuple[TinyGlm, Tokenizer]:
    model = TinyGlm(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in weights.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_windows(held_out: np.ndarray, length: int, count: int) -> list[Tensor]:
    """The first `count` whole windows of the held-out stream, each starting with <sop>."""
    found = []
    for start in range(0, len(held_out) - length - 2, length)[:count]:
        ids = torch.from_numpy(held_out[start : start + length + 2].copy())[None]
        ids[:, 0] = tiny.SPECIALS.index(tiny.BOS)
        found.append(ids)
    return found


def token_losses(model: TinyGlm, hidden: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model.lm_head(hidden)[0], targets[0], reduction="none")


def baselines(stream: np.ndarray, windows: list[Tensor], vocab: int) -> Numbers:
    """Unigram (add one) and bigram (backing off to it, best of six strengths)."""
    uni = (np.bincount(stream, minlength=vocab) + 1) / (len(stream) + vocab)
    pair = np.zeros((vocab, vocab), np.int32)
    np.add.at(pair, (stream[:-1], stream[1:]), 1)
    before = np.concatenate([w[0, :-2].numpy() for w in windows])
    after = np.concatenate([w[0, 1:-1].numpy() for w in windows])
    count, total = pair[before, after], pair.sum(1)[before]
    bigram = {
        a: float(-np.log((count + a * uni[after]) / (total + a)).mean())
        for a in (1, 3, 10, 30, 100, 300)
    }
    return {"unigram": float(-np.log(uni[after]).mean()), "bigram": min(bigram.values())}


def attention_mass(run: Pass, topk: int) -> list[list[list[float]]]:
    """Per full layer, per layer it serves: [indexer's top-k, best k keys, last k keys] shares."""
    assert run.rows is not None
    length = len(run.cos)
    recent = torch.arange(length)[None, :] > run.rows[:, None] - topk
    shares = []
    for scores, attention in run.groups:
        picked = scores.topk(topk).indices
        shares.append(
            [
                [
                    float(a.gather(2, picked).sum(-1).mean()),
                    float(a.topk(topk).values.sum(-1).mean()),
                    float((a * recent).sum(-1).mean()),
                ]
                for a in attention
            ]
        )
    return shares


@torch.no_grad()
def measure(model: TinyGlm, windows: list[Tensor], n_rows: int = 128) -> Numbers:
    """Loss sparse and dense, MTP loss and agreement, attention mass and ties, on the windows."""
    topk, rng = model.c["index_topk"], np.random.default_rng(1)
    sums: dict[str, list[float]] = {k: [] for k in ("sparse", "dense", "mtp", "agree", "ties")}
    mass = []
    for ids in windows:
        length = ids.shape[1] - 2
        late = np.sort(rng.choice(np.arange(topk, length), min(n_rows, length // 4), False))
        run = Pass.new(model.c, length, sparse=True)
        hidden = model.trunk(ids[:, :length], run)
        losses = token_losses(model, hidden, ids[:, 1:-1])
        draft = model.mtp(hidden, ids[:, 1:-1], run)
        sums["sparse"].append(float(losses.mean()))
        sums["mtp"].append(float(token_losses(model, draft, ids[:, 2:]).mean()))
        # the main head, one position later, predicts the same token as the MTP head
        same = model.lm_head(draft)[0, :-1].argmax(-1) == model.lm_head(hidden)[0, 1:].argmax(-1)
        sums["agree"].append(float(same.float().mean()))

        run = Pass.new(model.c, length, sparse=False, rows=torch.from_numpy(late))
        hidden = model.trunk(ids[:, :length], run)
        sums["dense"].append(float(token_losses(model, hidden, ids[:, 1:-1]).mean()))
        model.mtp(hidden, ids[:, 1:-1], run)
        mass.append(attention_mass(run, topk))
        for scores, _ in run.groups:
            edge = scores.topk(topk + 1).values
            sums["ties"].append(float((edge[..., -1] == edge[..., -2]).float().mean()))
    out: Numbers = {k: float(np.mean(v)) for k, v in sums.items()}
    out["mass"] = [np.mean([m[g] for m in mass], 0).tolist() for g in range(len(mass[0]))]
    out["windows"], out["length"] = len(windows), windows[0].shape[1] - 2
    return out


@torch.no_grad()
def loss_by_position(model: TinyGlm, ids: Tensor) -> list[tuple[int, int, float]]:
    """(from, to, mean loss) in six ranges of one long window, sparse attention."""
    length = ids.shape[1] - 2
    hidden = model.trunk(ids[:, :length], Pass.new(model.c, length, sparse=True))
    losses = token_losses(model, hidden, ids[:, 1:-1])
    edges = [0, *(length // d for d in (32, 16, 8, 4, 2, 1))]
    return [(a, b, float(losses[a:b].mean())) for a, b in pairwise(edges)]


@torch.no_grad()
def complete(model: TinyGlm, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, recomputing the whole prompt each time; stops at <|endoftext|>."""
    new: list[int] = []
    while len(new) < count and (not new or new[-1] != tiny.SPECIALS.index(tiny.EOS)):
        run = Pass.new(model.c, len(ids) + len(new), sparse=True)
        hidden = model.trunk(torch.tensor([ids + new]), run)
        new.append(int(model.lm_head(hidden[:, -1]).argmax()))
    return new


@torch.no_grad()
def compare_with_transformers(
    model: TinyGlm, tok: Tokenizer, folder: Path, ids: Tensor
) -> Numbers | None:
    """Load the folder in transformers (float32) and compare logits and greedy tokens."""
    try:
        import transformers
    except ImportError:
        return None
    hf, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    mtp = f"model.layers.{model.c['num_hidden_layers']}."
    other = [k for k in info["unexpected_keys"] if not k.startswith(mtp)]
    ours = model.lm_head(model.trunk(ids, Pass.new(model.c, ids.shape[1], sparse=True)))
    theirs = hf.eval()(ids).logits
    same = []
    for prompt in tiny.PROMPTS:
        start = tok.encode(prompt).ids
        done = hf.generate(torch.tensor([start]), max_new_tokens=32, do_sample=False)
        tail = done[0, len(start) :].tolist()
        same.append(tail == complete(model, start, len(tail)))
    # A tie at the top-k border may send the two ways, so rows are counted as well.
    rows = (ours - theirs).abs().amax(-1)[0]
    return {
        "version": transformers.__version__,
        "missing": len(info["missing_keys"]),
        "unexpected": len(info["unexpected_keys"]) - len(other),
        "other": len(other),
        "tokens": ids.shape[1],
        "max": float(rows.max()),
        "median": float(rows.median()),
        "argmax": int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        "greedy": f"{sum(same)} of {len(same)}",
    }


def card(f: Numbers, m: Numbers, c: Numbers, texts: list[tuple[str, str]]) -> str:
    full = [i for i, kind in enumerate(c["indexer_types"]) if kind == "full"]
    mass = []
    for group, leader in zip(m["mass"], [*full, c["num_hidden_layers"]], strict=True):
        for i, share in enumerate(group):
            name = f"{leader + i} ({'full' if i == 0 else f'shared, uses layer {leader}'})"
            name = name if leader < c["num_hidden_layers"] else f"{leader} (MTP, full)"
            mass.append("| " + " | ".join([name, *(f"{100 * s:.1f} %" for s in share)]) + " |")
    phases = [
        f"| {n} | {', '.join(map(str, sorted(set(p['lengths']))))} | {p['steps']} | "
        f"{p['tokens']:,} |"
        for n, p in f["phases"].items()
    ]
    places = [f"| {a}-{b} | {loss:.3f} |" for a, b, loss in m["buckets"]]
    shown = [f"```python\n{p}\n```\n\ngives\n\n```python\n{t}\n```" for p, t in texts]
    hf = m["transformers"]
    check = (
        f"transformers {hf['version']} loads the folder: {hf['missing']} missing keys, "
        f"{hf['unexpected']} keys of the MTP layer and {hf['other']} others unexpected. Against "
        f"the training model, both in float32, on {hf['tokens']} held-out tokens (beyond "
        f"index_topk): largest logit difference {hf['max']:.1e}, median over rows "
        f"{hf['median']:.1e}, same argmax on {hf['argmax']} rows; 32 greedy tokens equal for "
        f"{hf['greedy']} prompts."
        if hf
        else "transformers was not installed when this card was written."
    )
    busy = f["cpu_seconds"] < 0.75 * f["threads"] * f["seconds"]
    shared = ", on cores shared with other jobs" if busy else ""
    more = f", then `--resume` with half the learning rates for {f.get('resumed', 0):g} minutes"
    again = more if "resumed" in f else ""
    nl = "\n"
    return f"""---
license: psf-2.0
library_name: transformers
tags: [glm_moe_dsa, tiny, demo]
---
# tiny-glm-python

A {m["parameters"] / 1e6:.2f} M parameter `glm_moe_dsa` model (GLM-5's architecture: MLA with a
DSA indexer, mixture of experts, one MTP layer) that completes Python. It is a test subject for
KV-cache code, not a useful model. Small in every free dimension, it keeps GLM's cache rows:
`kv_lora_rank` 512, `qk_rope_head_dim` 64, `index_head_dim` 128. Layers: {c["num_hidden_layers"]}
({", ".join(c["indexer_types"])}) + 1 MTP; hidden {c["hidden_size"]}; {c["n_routed_experts"]}
routed experts, {c["num_experts_per_tok"]} a token, and a shared one; `index_topk`
{c["index_topk"]}; vocabulary {c["vocab_size"]}. Files: {m["bytes"] / 1e6:.1f} MB.

## How it was made

`python examples/train_tiny_glm.py --minutes {f["minutes"]:g}`{again}, Python {f["python"]},
{f["threads"]} threads, float32, no accelerator{shared}. The
training itself took {f["seconds"] / 60:.1f} minutes of wall
time and {f["cpu_seconds"] / 60:.1f} CPU-minutes (two free cores would have given
{2 * f["seconds"] / 60:.0f}): {f["steps"]} steps,
{sum(p["tokens"] for p in f["phases"].values()):,} tokens. The phases end at shares of the wall
time, so another run gives another model.

| phase | window length | steps | tokens |
|---|---|---|---|
{nl.join(phases)}

Embedding and head start from the training text's bigram table (loss {f["bigram_loss"]:.2f} there,
fitted in the first minutes), and the layers from zero output.

Data: {f["train_files"]} `.py` files of the standard library
({f["train_bytes"] / 1e6:.1f} MB, no tests, no `encodings`) and {f["chats"]} chats made from their
docstrings ("Write `name`. ..." -> the function); {f["train_tokens"]:,} tokens in all, drawn in
random windows. Every 20th file is held out ({f["held_files"]} files, {f["held_tokens"]:,} tokens,
{f["held_bytes"] / f["held_tokens"]:.2f} bytes a token). Muon for the matrices inside layers, Adam
for the rest. The indexers learn from KL against the attention distribution, averaged over heads
and over the layers a full layer serves, on sampled query rows;
in the sparse phase every layer attends to the top-k only. Experts are balanced by the router's
bias, without an auxiliary loss.

## Measured on held-out files

{m["windows"]} windows of {m["length"]} tokens, weights as stored (bf16), computed in float32.

| | nats/token |
|---|---|
| unigram | {m["unigram"]:.3f} |
| bigram | {m["bigram"]:.3f} |
| this model, sparse attention (as served) | {m["sparse"]:.3f} |
| this model, dense attention | {m["dense"]:.3f} |
| its MTP layer, predicting one token further | {m["mtp"]:.3f} |

The MTP layer's choice equals the main head's choice for the same token at {100 * m["agree"]:.1f} %
of positions.

Share of the dense attention mass (mean over heads; query rows after the first {c["index_topk"]})
that {c["index_topk"]} keys keep:

| layer | indexer's top-k | best possible | most recent keys |
|---|---|---|---|
{nl.join(mass)}

Rows whose top-k border is an exact tie of index scores: {100 * m["ties"]:.2f} %.

Loss by position, sparse, in one window of {m["buckets"][-1][1]} tokens (training windows ended
at {max(n for p in f["phases"].values() for n in p["lengths"])}):

| position | nats/token |
|---|---|
{nl.join(places)}

{check}

## Greedy completions

{(nl * 2).join(shown)}

## Use

Prompts start with `<sop>` (the tokenizer adds it; the chat template writes its own, so encode a
rendered chat without special tokens). `<|endoftext|>` ends a text; in a chat `<|user|>` does too.

## Known limits

- Trained for minutes on little of one code base: it writes Python-shaped text, not working
  programs, repeats itself, and answers nothing but "Write `name`." chats, badly.
- A prompt that ends in a space ends in a token the training text hardly has (words carry the space
  before them), so `def` completes better than `def ` with a space.
- Positions beyond the training windows are extrapolated; see the table above.
- Compute in float32 when tokens must be reproduced: logits lie close together.
- The MTP layer follows vLLM's convention (embedding zeroed at position 0); transformers ignores it.

## Licence

Trained on CPython's standard library sources, which are under the PSF licence (some files carry
their own notices); the weights are offered under the same terms.
"""


def write_card(folder: Path, stream: np.ndarray, held_out: np.ndarray) -> None:
    start = time.time()
    model, tok = load(folder)
    facts = json.loads((folder / "training.json").read_text())
    smoke = model.c["hidden_size"] < 100
    length, count, long_length = (96, 2, 192) if smoke else (2048, 8, 8192)
    windows = held_windows(held_out, length, count)
    m = measure(model, windows) | baselines(stream, windows, model.c["vocab_size"])
    m["buckets"] = loss_by_position(model, held_windows(held_out, long_length, 1)[0])
    m["transformers"] = compare_with_transformers(model, tok, folder, windows[0][:, :1024])
    m["parameters"] = sum(p.numel() for p in model.parameters())
    files = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    m["bytes"] = sum((folder / name).stat().st_size for name in files)
    chat = f"{tiny.BOS}<|user|>\n{tiny.ASK}<|assistant|>\n"
    texts = []
    for prompt in [*tiny.PROMPTS, chat]:
        ids = tok.encode(prompt, add_special_tokens=prompt is not chat).ids
        done = tok.decode(complete(model, ids, 8 if smoke else 64), skip_special_tokens=True)
        texts.append((prompt, (done if prompt is chat else prompt + done).replace("```", "'''")))
    facts["measured"] = m
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "README.md").write_text(card(facts, m, model.c, texts))
    print(f"measured in {time.time() - start:.0f} s: {json.dumps(m)}", flush=True)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    small = json.loads((target / "config.json").read_text())["hidden_size"] < 100
    _, train_stream, held_stream, _ = tiny.prepare(
        small, Tokenizer.from_file(str(target / "tokenizer.json"))
    )
    write_card(target, train_stream, held_stream)
