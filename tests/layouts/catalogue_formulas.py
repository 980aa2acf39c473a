"""Where the sources say that a byte lies: plain arithmetic on indices, entry by entry.

For keys and values: (region, element index) of layer y, v (0 key, 1 value), block b, token t of
the block, head h, element d. For rows: (region, byte index) of layer y, block b, token t and byte o
of the packed row. `None` is the one region of the entry. Written from the sources' own shapes and
kernels, with nothing of the catalogue.
"""

L, NB, N, H, D = 3, 4, 32, 3, 32
"""Layers, blocks, tokens of a block, heads, elements of a head; elements are bf16."""
D2 = 2 * D
C, W, ME = 2, 3, 1
"""Device blocks of an offload chunk, workers of its row, and which of them we are."""
PAGE = 4096


def flat(dims, index):
    """The element of a dense array of `dims` at `index`."""
    at = 0
    for size, i in zip(dims, index, strict=True):
        at = at * size + i
    return at


def up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


def _cpu_vec(y, v, b, t, h, d):
    head = flat((L, NB, H), (y, b, h)) * 2 * N * D
    return None, head + (N * D + t * D + d if v else d * N + t)


def _cpu_amx(y, v, b, t, h, d):
    head = flat((L, NB, H), (y, b, h)) * 2 * N * D
    if v:
        return None, head + N * D + d // 16 * 16 * N + t // 2 * 32 + d % 16 * 2 + t % 2
    return None, head + t // 16 * 16 * D + d // 2 * 32 + t % 16 * 2 + d % 2


def _vectorized(y, v, b, t, h, d):
    if v:
        return (y, v), flat((NB, H, N // 8, D, 8), (b, h, t // 8, d, t % 8))
    return (y, v), flat((NB, H, D // 8, N, 8), (b, h, d // 8, t, d % 8))


def _token_major(y, v, b, t, h, d):
    entry = L * 2 * H * D  # elements; a multiple of 32 bytes here
    return None, (b * N + t) * entry + y * 2 * H * D + v * H * D + h * D + d


def _trtllm(y, v, b, t, h, d):
    block = H * N * D
    return None, ((b * L + y) * 2 + v) * block + h * N * D + t * D + d


def _offload(y, v, b, t, h, d, *, hnd):
    page = N * H * 2 * D
    row = up(W * L * C * page * 2, PAGE) // 2
    device_block, token = t // N, t % N
    base = b * row + ME * L * C * page + y * C * page + device_block * page
    head = flat((H, N), (h, token)) if hnd else flat((N, H), (token, h))
    return None, base + head * 2 * D + v * D + d


GQA = {
    "vllm.lbnhc": lambda y, v, b, t, h, d: (None, flat((L, NB, N, H, D2), (y, b, t, h, v * D + d))),
    "vllm.lbhnc": lambda y, v, b, t, h, d: (None, flat((L, NB, H, N, D2), (y, b, h, t, v * D + d))),
    "vllm.blnhc": lambda y, v, b, t, h, d: (None, flat((NB, L, N, H, D2), (b, y, t, h, v * D + d))),
    "vllm.blhnc": lambda y, v, b, t, h, d: (None, flat((NB, L, H, N, D2), (b, y, h, t, v * D + d))),
    "vllm.bhlnc": lambda y, v, b, t, h, d: (None, flat((NB, H, L, N, D2), (b, h, y, t, v * D + d))),
    "vllm.lhbnc": lambda y, v, b, t, h, d: (None, flat((L, H, NB, N, D2), (y, h, b, t, v * D + d))),
    "vllm.flash_nhd": lambda y, v, b, t, h, d: (y, flat((2, NB, N, H, D), (v, b, t, h, d))),
    "vllm.flash_hnd": lambda y, v, b, t, h, d: (y, flat((2, NB, H, N, D), (v, b, h, t, d))),
    "vllm.flashinfer_nhd": lambda y, v, b, t, h, d: (y, flat((NB, 2, N, H, D), (b, v, t, h, d))),
    "vllm.flashinfer_hnd": lambda y, v, b, t, h, d: (y, flat((NB, 2, H, N, D), (b, v, h, t, d))),
    "vllm.cross_layer": lambda y, v, b, t, h, d: (
        None, flat((NB, L, 2, N, H, D), (b, y, v, t, h, d))),
    "vllm.cpu_vec": _cpu_vec,
    "vllm.cpu_amx": _cpu_amx,
    "vllm.offload_nhd": lambda *i: _offload(*i, hnd=False),
    "vllm.offload_hnd": lambda *i: _offload(*i, hnd=True),
    "sglang.mha_nhd": lambda y, v, b, t, h, d: (y, flat((2, NB * N, H, D), (v, b * N + t, h, d))),
    "sglang.mha_hnd": lambda y, v, b, t, h, d: (y, flat((2, NB, H, N, D), (v, b, h, t, d))),
    "sglang.mha_vectorized": _vectorized,
    "sglang.mha_token_major": _token_major,
    "sglang.hicache_layer_first": lambda y, v, b, t, h, d: (
        None, flat((2, L, NB * N, H, D), (v, y, b * N + t, h, d))),
    "sglang.hicache_page_first": lambda y, v, b, t, h, d: (
        None, flat((2, NB * N, L, H, D), (v, b * N + t, y, h, d))),
    "sglang.hicache_page_first_direct": lambda y, v, b, t, h, d: (
        None, flat((2, NB, L, N, H, D), (v, b, y, t, h, d))),
    "sglang.hicache_page_head": lambda y, v, b, t, h, d: (
        None, flat((2, NB, H, N, L, D), (v, b, h, t, y, d))),
    "sglang.hicache_page_unified": lambda y, v, b, t, h, d: (
        None, flat((NB, H, L, 2, N, 1, D), (b, h, y, v, t, 0, d))),
    "trtllm.pool": _trtllm,
    "dynamo.layer_separate_outer": lambda y, v, b, t, h, d: (
        y, b * (N * H * D) + v * (NB * N * H * D) + flat((N, H * D), (t, h * D + d))),
    "dynamo.layer_separate_block": lambda y, v, b, t, h, d: (
        y, b * (2 * N * H * D) + v * (N * H * D) + flat((N, H * D), (t, h * D + d))),
    "dynamo.fully_contiguous": lambda y, v, b, t, h, d: (
        None,
        b * (L * 2 * N * H * D) + y * (2 * N * H * D) + v * (N * H * D) + t * H * D + h * D + d),
    "dynamo.operational_hnd": lambda y, v, b, t, h, d: (
        None, flat((NB, L, 2, H, N, D), (b, y, v, h, t, d))),
    "dynamo.universal_tp": lambda y, v, b, t, h, d: (
        None, flat((NB, H, L, 2, N, D), (b, h, y, v, t, d))),
    "dynamo.universal_pp": lambda y, v, b, t, h, d: (
        None, flat((NB, L, H, 2, N, D), (b, y, h, v, t, d))),
    "lmcache.kv_2ltd": lambda y, v, b, t, h, d: (
        None, b * (2 * L * N * H * D) + flat((2, L, N, H * D), (v, y, t, h * D + d))),
    "lmcache.kv_t2d": lambda y, v, b, t, h, d: (
        y, b * (2 * N * H * D) + flat((N, 2, H * D), (t, v, h * D + d))),
    "lmcache.kv_2td": lambda y, v, b, t, h, d: (
        y, b * (2 * N * H * D) + flat((2, N, H * D), (v, t, h * D + d))),
}  # fmt: skip


# --- rows -----------------------------------------------------------------------------------------


def rows(dims, index, row, o):
    return flat((*dims, row), (*index, o))


def planar(page, t, o):
    """In a page that begins at `page`: 128 bytes of values, 4 of scale."""
    return page + t * 128 + o if o < 128 else page + N * 128 + t * 4 + (o - 128)


def tiled(page, t, o):
    """Values in tiles of 16 tokens by 16 bytes."""
    if o >= 128:
        return page + N * 128 + t * 4 + (o - 128)
    return page + t // 16 * (16 * 128) + o // 16 * 256 + t % 16 * 16 + o % 16


def _dsv4(y, b, t, o):
    page = up(N * 584, 576)
    base = (b * L + y) * page
    return None, base + (t * 576 + o if o < 576 else N * 576 + t * 8 + (o - 576))


def _dsv41(y, b, t, o):
    page = up(N * 528, 512)
    base = (b * L + y) * page
    return None, base + (t * 512 + o if o < 512 else N * 512 + t * 16 + (o - 512))


def _offload_rows(y, b, t, o):
    page = N * 656
    row = up(W * L * C * page, PAGE)
    return None, b * row + ME * L * C * page + y * C * page + t // N * page + t % N * 656 + o


def _offload_index(y, b, t, o):
    page = N * 132
    row = up(W * L * C * page, PAGE)
    base = b * row + ME * L * C * page + y * C * page + t // N * page
    return None, planar(base, t % N, o)


LATENT = {
    "vllm.mla_bf16": (1152, lambda y, b, t, o: (None, rows((L, NB, N), (y, b, t), 1152, o))),
    "vllm.fp8_ds_mla": (656, lambda y, b, t, o: (None, rows((L, NB, N), (y, b, t), 656, o))),
    "vllm.nvfp4_ds_mla": (352, lambda y, b, t, o: (None, rows((L, NB, N), (y, b, t), 352, o))),
    "vllm.dsv4": (584, _dsv4),
    "vllm.dsv41": (528, _dsv41),
    "vllm.hisparse_host": (656, lambda y, b, t, o: (None, rows((L, NB, N), (y, b, t), 656, o))),
    "vllm.offload_fp8_ds_mla": (656, _offload_rows),
    "sglang.mla_bf16": (1152, lambda y, b, t, o: (y, rows((NB * N, 1), (b * N + t, 0), 1152, o))),
    "sglang.mla_token_major": (
        1152, lambda y, b, t, o: (None, (b * N + t) * L * 1152 + y * 1152 + o)),
    "sglang.dsa_fp8": (656, lambda y, b, t, o: (y, rows((NB * N, 1), (b * N + t, 0), 656, o))),
    "sglang.hicache_mla_layer_first": (
        656, lambda y, b, t, o: (None, rows((L, NB * N), (y, b * N + t), 656, o))),
    "sglang.hicache_mla_page_first": (
        656, lambda y, b, t, o: (None, rows((NB * N, L), (b * N + t, y), 656, o))),
    "sglang.hicache_mla_page_first_direct": (
        656, lambda y, b, t, o: (None, rows((NB, L, N), (b, y, t), 656, o))),
    "trtllm.mla_pool": (
        1152, lambda y, b, t, o: (None, rows((NB, L, 1, N), (b, y, 0, t), 1152, o))),
    "dynamo.mla_fully_contiguous": (
        1152, lambda y, b, t, o: (None, b * (L * N * 1152) + y * (N * 1152) + t * 1152 + o)),
    "lmcache.kv_mla": (
        1152, lambda y, b, t, o: (None, b * (L * N * 1152) + rows((1, L, N), (0, y, t), 1152, o))),
}  # fmt: skip

INDEX = {
    "vllm.indexer": lambda y, b, t, o: (None, planar((y * NB + b) * N * 132, t, o)),
    "vllm.indexer_shuffled": lambda y, b, t, o: (None, tiled((y * NB + b) * N * 132, t, o)),
    "vllm.offload_indexer": _offload_index,
    "sglang.dsa_indexer": lambda y, b, t, o: (y, planar(b * N * 132, t, o)),
    "sglang.dsa_indexer_preshuffled": lambda y, b, t, o: (y, tiled(b * N * 132, t, o)),
    "sglang.hicache_indexer_layer_first": lambda y, b, t, o: (
        None, planar((y * NB + b) * N * 132, t, o)),
    "sglang.hicache_indexer_page_first": lambda y, b, t, o: (
        None, planar((b * L + y) * N * 132, t, o)),
    "trtllm.indexer_pool": lambda y, b, t, o: (None, planar((b * L + y) * N * 132, t, o)),
}  # fmt: skip

HIDDEN = ("vllm.hisparse_host_rows", "vllm.hisparse_device")
"""Entries whose blocks are no blocks of N tokens; they have tests of their own."""
