"""HiSparse decodes the tokens that pages of everything decode."""

import torch
from hisparse_world import TEXTS, TOPK, Blocks, chosen, hisparse_memory, paged_memory, step

from kvflow.engine.hisparse import HiSparseSizes

torch.set_num_threads(1)


def decode(memory, counts, text, prompt, num_tokens, chunk):
    """Tokens of one request, its prompt in steps of `chunk`."""
    tables, tokens = Blocks(memory, counts).take(prompt + num_tokens), list(text[:prompt])
    for start in range(0, prompt, chunk):
        logits = step(memory, [("a", start, tokens[start : start + chunk], tables)])["a"]
    for _ in range(num_tokens):
        tokens.append(chosen(logits)[-1])
        logits = step(memory, [("a", len(tokens) - 1, tokens[-1:], tables)])["a"]
    return tokens[prompt:]


def test_a_long_prompt_then_single_tokens():
    """200 tokens in steps of 40, then 24 decoded: hot rows for one query alone."""
    memory = hisparse_memory(HiSparseSizes(TOPK, 1, TOPK))
    found = decode(memory, {"latent": 64, "indexer": 64}, TEXTS[0], 200, 24, 40)
    assert found == decode(paged_memory(), {"kv": 64}, TEXTS[0], 200, 24, 40)
