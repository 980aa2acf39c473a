"""Token-exact against transformers' float32 outputs of a small trained-scale model."""

from typing import Any

import pytest
import torch
from dense_kv import DenseKV, segment
from glm_drive import greedy
from glm_fixture import TINY

from kvflow.comm import LocalComm
from kvflow.kernels.codec import decode_index_key, decode_latent
from kvflow.models import Glm

DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROPE = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
"""HF's rope order [evens | odds] in terms of adjacent pairs."""


@pytest.fixture(scope="module", params=DTYPES)
def glm(request: Any) -> Glm:
    return Glm.load(TINY, kv_dtype=request.param, dtype=DTYPES[request.param])


@pytest.mark.parametrize("name", ["p12", "p48", "p200"])
def test_greedy_tokens(glm: Glm, prompts: Any, name: str) -> None:
    prompt = prompts[name]
    assert greedy(glm, prompt["ids"], 32) == prompt["greedy"]


@pytest.mark.parametrize("name", ["p12", "p48", "p200"])
def test_prompt_and_mtp_logits(glm: Glm, prompts: Any, reference: Any, name: str) -> None:
    ids, first = prompts[name]["ids"], prompts[name]["greedy"][0]
    comm = LocalComm()
    kv, part = DenseKV(comm, glm.spec), [segment(0, range(len(ids)), len(ids))]
    kv.begin(part)
    hidden = glm.forward(torch.tensor(ids), part, kv, comm)
    torch.testing.assert_close(
        glm.logits(hidden).float(), reference[f"{name}.prompt_logits"], rtol=0, atol=1e-4
    )
    kv.begin(part)
    following = torch.tensor([*ids[1:], first])
    logits = glm.logits(glm.mtp_forward(following, hidden, part, kv, comm)[0])
    expected = reference[f"{name}.mtp_logits_vllm"]
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=1e-4)
    by_attending = dict(kv.table)
    kv.begin(part)
    kv.table = {}
    glm.write_mtp(following, hidden, part, kv)
    assert set(kv.published) == set(glm.spec.select(part="mtp")) == set(kv.released)
    assert all(torch.equal(row, by_attending[key]) for key, row in kv.table.items())
    assert len(kv.table) == 2 * len(ids)


@pytest.mark.parametrize("name", ["p12", "p48"])
def test_cache_rows(glm: Glm, prompts: Any, reference: Any, name: str) -> None:
    ids = prompts[name]["ids"]
    comm = LocalComm()
    kv, part = DenseKV(comm, glm.spec), [segment(0, range(len(ids)), len(ids))]
    kv.begin(part)
    hidden = glm.forward(torch.tensor(ids), part, kv, comm)
    kv.begin(part)
    glm.write_mtp(torch.tensor([*ids[1:], prompts[name]["greedy"][0]]), hidden, part, kv)
    for c in glm.spec.components:
        rows = torch.stack([kv.table[c.name, 0, p] for p in range(len(ids))])
        layer = f"{name}.mtp" if c.part == "mtp" else f"{name}.layer{c.layer_id}"
        if c.kind == "latent":
            got = decode_latent(c.record, rows, torch.float32)
            want = torch.cat([reference[f"{layer}.kv_latent"], reference[f"{layer}.k_rope"]], -1)
            got = torch.cat([got[:, :32], got[:, 32:][:, ROPE]], -1)
        else:
            got = decode_index_key(c.record, rows, torch.float32)
            want = reference[f"{layer}.idx_k"]
            got = torch.cat([got[:, :16][:, ROPE], got[:, 16:]], -1)
        torch.testing.assert_close(got, want, rtol=0, atol=3e-5, msg=c.name)
