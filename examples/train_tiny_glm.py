"""Train a small `glm_moe_dsa` model from scratch on the Python standard library, on two CPU cores.

The model is tiny in every free dimension but keeps GLM's real cache rows (512-value latent,
64-value rotary key, 128-value index key), so a run of it moves real-sized rows. The model is in
models/tiny-glm-python/modeling.py, the measurements and the card in measure.py beside it.

    python examples/train_tiny_glm.py --minutes 38 --out examples/models/tiny-glm-python
    python examples/train_tiny_glm.py --smoke --out /tmp/tiny-glm-smoke

Embedding and head are first fitted to the text's bigram table; then come phases, each a share of
the wall time (so a run is not bit-reproducible): dense attention on short windows; the same on
longer windows while the indexers learn; sparse attention, where every layer really attends to its
indexer's top-k only. An indexer learns only from KL(mean attention of the layers it serves ||
softmax of its scores) on a sample of query rows;
its inputs are detached. The multi-token-prediction (MTP) layer trains beside the trunk with its
own loss, on a part of the windows. What is measured at the end goes into the model card.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import runpy
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

MODEL_DIR = Path(__file__).resolve().parent / "models" / "tiny-glm-python"
sys.path.insert(0, str(MODEL_DIR))
from modeling import Gate, Pass, TinyGlm  # noqa: E402

EOS, BOS, ROLES = "<|endoftext|>", "<sop>", ("system", "user", "assistant", "observation")
SPECIALS = [EOS, BOS, *(f"<|{role}|>" for role in ROLES)]
SKIP_DIRS = {"test", "tests", "encodings", "site-packages", "dist-packages", "__pycache__"}
PROMPTS = ["def ", "import ", "class Foo:\n    def __init__(self"]
ASK = "Write `join`.\nJoin two or more pathname components."
# Roles are marked like GLM's own template: a marker, a newline, the text; <sop> opens the prompt.
CHAT_TEMPLATE = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{{ part.text }}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


# ---------------------------------------------------------------- data and tokenizer


def library_files() -> tuple[list[Path], list[Path]]:
    """(training, held-out) standard-library sources; every 20th of the sorted list is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not SKIP_DIRS & set(p.relative_to(root).parts)]
    files.sort(key=lambda p: p.relative_to(root).as_posix())
    return [p for i, p in enumerate(files) if i % 20 != 7], files[7::20]


def chat_documents(source: str) -> list[str]:
    """Chats 'Write `name`. <docstring>' -> the function's source, three exchanges in each."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    turns, lines = [], source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(code) < 3000:
                ask = f"Write `{node.name}`.\n{doc.split(chr(10) * 2)[0]}"
                turns.append(f"<|user|>\n{ask}<|assistant|>\n{code}")
    return ["".join(turns[i : i + 3]) for i in range(0, len(turns), 3)]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose post-processor puts <sop> in front (special tokens on, the default)."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    return tok


def encode(tok: Tokenizer, documents: list[str]) -> np.ndarray:
    encoded = tok.encode_batch([BOS + d + EOS for d in documents], add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, np.int64) for e in encoded])


def windows(stream: np.ndarray, length: int, batch: int, rng: np.random.Generator) -> Iterator:
    """Endless [batch, length + 2] windows in random order; every window starts with <sop>."""
    while True:
        first = int(rng.integers(0, length))
        starts = rng.permutation(np.arange(first, len(stream) - length - 2, length))
        for i in range(0, len(starts) - batch + 1, batch):
            ids = np.stack([stream[s : s + length + 2] for s in starts[i : i + batch]])
            ids[:, 0] = SPECIALS.index(BOS)
            yield torch.from_numpy(ids)


def make_config(smoke: bool) -> dict[str, Any]:
    """The checkpoint's config.json; the full/shared pattern is spelled for HF and for vLLM."""
    layers, freq, offset = 4, 2, 1
    full = [max(i - offset + 1, 0) % freq == 0 for i in range(layers)]
    # fmt: off
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "dtype": "bfloat16", "vocab_size": 512 if smoke else 4096, "tie_word_embeddings": False,
        "hidden_size": 64 if smoke else 192, "intermediate_size": 128 if smoke else 512,
        "num_hidden_layers": layers, "num_nextn_predict_layers": 1, "hidden_act": "silu",
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32 if smoke else 96,
        "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "qk_head_dim": 96,
        "head_dim": 64, "v_head_dim": 64, "attention_bias": False, "attention_dropout": 0.0,
        "index_n_heads": 16, "index_head_dim": 128, "index_topk": 16 if smoke else 256,
        "index_topk_freq": freq, "index_topk_pattern": None, "index_skip_topk_offset": offset,
        "indexer_types": ["full" if f else "shared" for f in full],
        "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True,
        "layer_types": ["indexed_attention"] * layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1), "mlp_bias": False,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32 if smoke else 96, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5, "rope_interleave": True, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "initializer_range": 0.02, "use_cache": True, "bos_token_id": SPECIALS.index(BOS),
        "eos_token_id": SPECIALS.index(EOS), "pad_token_id": SPECIALS.index(EOS),
    }
    # fmt: on


# ---------------------------------------------------------------- training


class Optimizer:
    """Muon for the matrices inside layers (equal shapes batched), Adam for everything else."""

    def __init__(self, model: nn.Module) -> None:
        self.muon: list[nn.Parameter] = []
        self.heads: dict[nn.Parameter, int] = {}  # up-projections are orthogonalised per head
        self.adam: list[tuple[nn.Parameter, float]] = []
        for name, p in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                self.adam.append((p, 1e-3 if "lm_head" in name else 2e-3))
            elif p.ndim < 2 or name.endswith((".gate.weight", "weights_proj.weight")):
                self.adam.append((p, 3e-3))
            else:
                self.muon.append(p)
                if name.endswith(("wq_b.weight", "q_b_proj.weight", "kv_b_proj.weight")):
                    self.heads[p] = 16 if "wq_b" in name else 4
        self.state: dict[nn.Parameter, list[Tensor]] = {}
        self.steps: dict[nn.Parameter, int] = {}

    @staticmethod
    def orthogonal(g: Tensor) -> Tensor:
        """Newton-Schulz iteration on a stack of matrices."""
        tall = g.shape[1] > g.shape[2]
        x = g.mT if tall else g
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(4):
            s = x @ x.mT
            x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
        return x.mT if tall else x

    @torch.no_grad()
    def step(self, scale: float, muon_lr: float = 0.02, decay: float = 0.02) -> None:
        stacks: dict[torch.Size, list[nn.Parameter]] = {}
        for p in self.muon:
            if p.grad is not None:
                stacks.setdefault(p.shape, []).append(p)
        for shape, ps in stacks.items():
            update = []
            for p in ps:
                (m,) = self.state.setdefault(p, [torch.zeros_like(p)])
                m.mul_(0.95).add_(p.grad)
                update.append(p.grad + 0.95 * m)
            parts = self.heads.get(ps[0], 1)
            flat = torch.stack(update).view(len(ps) * parts, shape[0] // parts, shape[1])
            lr = muon_lr * scale * max(1.0, flat.shape[1] / flat.shape[2]) ** 0.5
            for p, u in zip(ps, self.orthogonal(flat).view(-1, *shape), strict=True):
                p.mul_(1 - muon_lr * scale * decay).sub_(lr * u)
        for p, lr in self.adam:
            if p.grad is not None:
                m, v = self.state.setdefault(p, [torch.zeros_like(p), torch.zeros_like(p)])
                n = self.steps[p] = self.steps.get(p, 0) + 1
                m.lerp_(p.grad, 0.1)
                v.lerp_(p.grad.square(), 0.05)
                root = (v / (1 - 0.95**n)).sqrt_().add_(1e-10)
                p.addcdiv_(m, root, value=-lr * scale / (1 - 0.9**n))
        for p in [*self.muon, *(p for p, _ in self.adam)]:
            p.grad = None


def head_loss(model: TinyGlm, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten())


def index_loss(run: Pass) -> Tensor:
    """Mean over full layers of KL(mean attention of the layers served || softmax of scores)."""
    losses = []
    for scores, attention in run.groups:
        target = torch.stack(attention).mean(0)
        log_q = scores.log_softmax(-1).masked_fill(scores == -math.inf, 0.0)
        losses.append((torch.special.xlogy(target, target) - target * log_q).sum(-1).mean())
    return torch.stack(losses).mean()


def start_from_bigrams(model: TinyGlm, stream: np.ndarray, seconds: float, steps: int) -> float:
    """Fit embedding and head to the training text's bigram table; returns the loss reached.

    The layers' outputs start at zero, so the model starts as this bigram model, and the MTP layer
    as the same one for its own token: the scarce steps go into what a bigram cannot know.
    """
    vocab, hidden = model.c["vocab_size"], model.c["hidden_size"]
    counts = np.bincount(stream[:-1] * vocab + stream[1:], minlength=vocab * vocab)
    table = torch.from_numpy(counts).view(vocab, vocab).float()
    total = table.sum(1, keepdim=True)
    table = (table + 10 * (table.sum(0) + 1) / (table.sum() + vocab)) / (total + 10)
    weight = (total + 1).sqrt()
    logits = table.log()
    u, s, v = torch.svd_lowrank((logits - logits.mean(1, keepdim=True)) * weight, q=hidden, niter=2)
    embed, head = u * s.sqrt() / weight, v * s.sqrt()
    rms = embed.square().mean(1, keepdim=True).sqrt()
    tokens, out = model.model["embed_tokens"].weight, model.lm_head.weight
    with torch.no_grad():
        tokens.copy_(embed / rms)
        out.copy_(head * (rms * total).sum() / total.sum())
        last = model.model["layers"][-1]
        last.eh_proj.weight.copy_(torch.eye(hidden, 2 * hidden))
    optimizer, start, loss = torch.optim.Adam([tokens, out], 0.02, (0.9, 0.95)), time.time(), 0.0
    for step in range(steps):
        done = max(step / steps, (time.time() - start) / seconds)
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = 0.015 * (1 - done)
        rows = torch.multinomial(total[:, 0], 640, replacement=True)
        scores = F.linear(F.rms_norm(tokens[rows], (hidden,), eps=1e-5), out)
        value = -(table[rows] * scores.log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        loss += (value.item() - loss) / min(step + 1, 20)
        if step % 20 == 0:
            print(f"{time.time() - start:6.0f}s bigram step {step} loss {loss:.3f}", flush=True)
    optimizer.zero_grad()
    return loss


@dataclass
class Phase:
    name: str
    until: float  # share of the training time at which it ends
    lengths: tuple[int, ...]  # window lengths, taken in turn
    tokens: int  # tokens a step
    sparse: bool = False
    index_rows: int = 0  # query rows a window for the indexer's KL


def phases(smoke: bool) -> list[Phase]:
    if smoke:
        return [
            Phase("dense", 0.34, (64,), 256),
            Phase("dense + indexer", 0.67, (96,), 192, index_rows=16),
            Phase("sparse", 1.0, (96,), 192, sparse=True, index_rows=16),
        ]
    return [
        Phase("dense", 0.42, (256,), 1024),
        Phase("dense + indexer", 0.66, (512,), 1024, index_rows=32),
        Phase("dense + indexer, long", 0.80, (1024, 2048), 1024, index_rows=64),
        Phase("sparse", 1.0, (1024, 1024, 2048), 1024, sparse=True, index_rows=64),
    ]


def train(
    model: TinyGlm,
    stream: np.ndarray,
    seconds: float,
    smoke: bool,
    rate: float = 1.0,
    on_checkpoint: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train for the given wall time (smoke: nine steps); returns steps and tokens per phase."""
    rng, optimizer = np.random.default_rng(0), Optimizer(model)
    plan, start, saved, log = phases(smoke), time.time(), time.time(), {}
    feeds: dict[tuple[str, int], Iterator] = {}
    gates = [m for m in model.modules() if isinstance(m, Gate)]
    step, cpu = 0, time.process_time()
    while (done := step / 9 if smoke else (time.time() - start) / seconds) < 1:
        phase = next(p for p in plan if done < p.until)
        seen = log.setdefault(phase.name, {"steps": 0, "tokens": 0, "lengths": phase.lengths})
        length = phase.lengths[seen["steps"] % len(phase.lengths)]
        batch = max(1, phase.tokens // length)
        if (phase.name, length) not in feeds:
            feeds[phase.name, length] = windows(stream, length, batch, rng)
        ids = next(feeds[phase.name, length])
        rows = None
        if phase.index_rows:
            rows = torch.from_numpy(np.sort(rng.choice(length, phase.index_rows, replace=False)))
        scale = rate * min(1.0, (step + 1) / 10, (1 - done) / 0.6 + 0.02)

        run = Pass.new(model.c, length, phase.sparse, rows)
        hidden = model.trunk(ids[:, :length], run)
        loss = head_loss(model, hidden, ids[:, 1 : length + 1])
        total = loss
        if batch >= 4 or step % 2 == 0:  # the MTP layer sees a part of the windows
            part = max(1, batch // 4)
            mtp_hidden = model.mtp(hidden[:part], ids[:part, 1 : length + 1], run)
            mtp_loss = head_loss(model, mtp_hidden, ids[:part, 2 : length + 2])
            total = total + 0.3 * mtp_loss
        if rows is not None:
            kl = index_loss(run)
            total = total + kl
        total.backward()
        optimizer.step(scale)
        for gate in gates:
            gate.balance(2e-3 * scale)
        step += 1
        seen["steps"] += 1
        seen["tokens"] += batch * length
        if step % 10 == 0 or smoke:
            note = f" index KL {kl.item():.3f}" if rows is not None else ""
            elapsed = time.time() - start
            print(
                f"{elapsed:6.0f}s {done:5.1%} step {step} {phase.name} T={length} "
                f"loss {loss.item():.3f} mtp {mtp_loss.item():.3f}{note}",
                flush=True,
            )
        if on_checkpoint and time.time() - saved > 240:
            on_checkpoint()
            saved = time.time()
    used = time.process_time() - cpu
    return {"phases": log, "seconds": time.time() - start, "cpu_seconds": used, "steps": step}


# ---------------------------------------------------------------- files


def save(model: TinyGlm, tok: Tokenizer, out: Path) -> None:
    """Write the folder; weights in bf16, the router's bias in float32 as GLM's own files have."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.detach().to(torch.float32 if k.endswith("correction_bias") else torch.bfloat16)
        for k, v in model.state_dict().items()
    }
    save_file({k: v.contiguous() for k, v in weights.items()}, out / "part", {"format": "pt"})
    os.chmod(out / "part", 0o644)
    os.replace(out / "part", out / "model.safetensors")
    tok.save(str(out / "tokenizer.json"))
    eos, user = SPECIALS.index(EOS), SPECIALS.index("<|user|>")
    # fmt: off
    files: dict[str, dict[str, Any]] = {
        "config.json": model.c,
        "generation_config.json": {
            "bos_token_id": SPECIALS.index(BOS), "eos_token_id": [eos, user],
            "pad_token_id": eos, "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
            "pad_token": EOS, "additional_special_tokens": SPECIALS[2:],
            "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
            "model_max_length": model.c["max_position_embeddings"],
        },
    }
    # fmt: on
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def prepare(
    smoke: bool, tok: Tokenizer | None = None
) -> tuple[Tokenizer, np.ndarray, np.ndarray, dict[str, Any]]:
    """(tokenizer, shuffled training stream, held-out stream, facts for the card)."""
    train_files, held_files = library_files()
    if smoke:
        train_files, held_files = train_files[:12], held_files[:2]
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in train_files]
    held = [p.read_text(encoding="utf-8", errors="replace") for p in held_files]
    chats = [chat for text in texts for chat in chat_documents(text)]
    tok = tok or train_tokenizer(texts, make_config(smoke)["vocab_size"])
    documents = texts + chats
    order = np.random.default_rng(0).permutation(len(documents))
    stream, held_out = encode(tok, [documents[i] for i in order]), encode(tok, held)
    facts = {
        "python": platform.python_version(),
        "train_files": len(texts),
        "train_bytes": sum(len(t.encode()) for t in texts),
        "chats": len(chats),
        "train_tokens": len(stream),
        "held_files": len(held),
        "held_tokens": len(held_out),
        "held_bytes": sum(len(t.encode()) for t in held),
    }
    return tok, stream, held_out, facts


def main() -> None:
    start = time.time()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=38, help="total wall time")
    parser.add_argument("--out", type=Path, default=Path("examples/models/tiny-glm-python"))
    parser.add_argument("--resume", type=Path, help="start from this folder's weights")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    parser.add_argument("--checkpoints", type=Path, help="also save here every four minutes")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    tok, stream, held_out, facts = prepare(args.smoke)
    model = TinyGlm(make_config(args.smoke))
    if args.resume:
        weights = load_file(args.resume / "model.safetensors")
        model.load_state_dict({k: v.float() for k, v in weights.items()})
    print(facts, "parameters", sum(p.numel() for p in model.parameters()), flush=True)
    if not args.resume:
        limit = (5.0, 10) if args.smoke else (args.minutes * 5, 400)
        facts["bigram_loss"] = start_from_bigrams(model, stream, *limit)
    reserve = 300  # seconds for the measurements
    seconds = args.minutes * 60 - (time.time() - start) - reserve
    keep = (lambda: save(model, tok, args.checkpoints)) if args.checkpoints else None
    result = train(model, stream, seconds, args.smoke, args.rate, keep)
    if args.resume and (args.resume / "training.json").exists():
        before = json.loads((args.resume / "training.json").read_text())
        again = {f"{name}, resumed": phase for name, phase in result["phases"].items()}
        result["phases"] = before["phases"] | again
        facts |= {k: before[k] for k in ("bigram_loss", "minutes")} | {"resumed": args.minutes}
        result |= {k: before[k] + result[k] for k in ("seconds", "cpu_seconds", "steps")}
    facts |= result
    facts = {"minutes": args.minutes, "threads": torch.get_num_threads()} | facts
    save(model, tok, args.out)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    runpy.run_path(str(MODEL_DIR / "measure.py"))["write_card"](args.out, stream, held_out)


if __name__ == "__main__":
    main()
