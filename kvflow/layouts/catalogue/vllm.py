"""vLLM: keys and values on a device or a CPU.

Since v0.32 a cache is one tensor of the axes [L, B, H, N, C] in a physical order that is chosen
for the whole model; C holds key and value of one head one behind the other. Earlier versions keep
K and V on an axis of their own.
"""

from kvflow.layouts.catalogue.entry import Entry, Golden, Shape, Source

LLAMA = Shape(num_layers=32, num_blocks=1000, block_size=16, num_kv_heads=8, head_dim=128)
SMOLLM = Shape(
    num_layers=30, num_blocks=100, block_size=128, num_kv_heads=3, head_dim=64, dtype="float32"
)
GLM = Shape(
    num_layers=79,
    num_blocks=1000,
    block_size=64,
    full_layers=(0, 1, *(2 + 4 * i for i in range(20))),
)

LAYOUT = "vllm/v1/kv_cache_layout.py and vllm/v1/kv_cache_interface.py (compute_layout_strides)"


def _wheel(where: str, says: str) -> Source:
    return Source("vLLM", "v0.32.0", where, says)


FIVE_AXES = _wheel(
    LAYOUT,
    "the name is the order of layers, blocks, heads, tokens and content (NHD and HND are LBNHC and "
    "LBHNC); content is the key and the value of one head, each stride is the product of the sizes "
    "inside it",
)
PACKED = (
    Entry(
        "vllm.lbnhc",
        "gqa",
        "L B t h v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 65_536_000, 65_536, 2_097_152_000),
        note="K and V together, layer outermost; the default",
    ),
    Entry(
        "vllm.lbhnc",
        "gqa",
        "L B h t v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 65_536_000, 65_536, 2_097_152_000),
        note="K and V together, layer outermost",
    ),
    Entry(
        "vllm.blnhc",
        "gqa",
        "B L t h v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
        note="block outermost: one block of all layers is one run of bytes",
    ),
    Entry(
        "vllm.blhnc",
        "gqa",
        "B L h t v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
        note="block outermost",
    ),
    Entry(
        "vllm.bhlnc",
        "gqa",
        "B h L t v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 8_192, 2_097_152, 2_097_152_000),
        note="block outermost, a head of all layers together: pages of layers interlace",
    ),
    Entry(
        "vllm.lhbnc",
        "gqa",
        "L h B t v e",
        FIVE_AXES,
        Golden(LLAMA, 131_072, 65_536, 65_536_000, 8_192, 2_097_152_000),
        note="a head of all blocks together: pages of blocks interlace",
    ),
)

FLASH = Source(
    "vLLM",
    "main before the axes above, commit 0084b783",
    "vllm/v1/attention/backends/flash_attn.py (get_kv_cache_shape, get_kv_cache_stride_order)",
    "each layer is a tensor [2, B, N, H, D], K first; for HND the axes N and H change places",
)
FLASHINFER = Source(
    "LMCache",
    "0.5.6",
    "lmcache/v1/gpu_connector/kv_format/specs/nl_x_nb_two_*.py",
    "vLLM's FlashInfer backend gives each layer a tensor [B, 2, N, H, D]; for HND [B, 2, H, N, D]",
)
APART = (
    Entry(
        "vllm.flash_nhd",
        "gqa",
        "L | v B t h e",
        FLASH,
        Golden(LLAMA, 131_072, 65_536, None, 32_768, 2_097_152_000),
        note="K and V apart, a tensor for each layer",
    ),
    Entry(
        "vllm.flash_hnd",
        "gqa",
        "L | v B h t e",
        FLASH,
        Golden(LLAMA, 131_072, 65_536, None, 32_768, 2_097_152_000),
        note="K and V apart, a tensor for each layer",
    ),
    Entry(
        "vllm.flashinfer_nhd",
        "gqa",
        "L | B v t h e",
        FLASHINFER,
        Golden(LLAMA, 131_072, 65_536, None, 65_536, 2_097_152_000),
        note="K and V of a block behind each other, a tensor for each layer",
    ),
    Entry(
        "vllm.flashinfer_hnd",
        "gqa",
        "L | B v h t e",
        FLASHINFER,
        Golden(LLAMA, 131_072, 65_536, None, 65_536, 2_097_152_000),
        note="K and V of a block behind each other, a tensor for each layer",
    ),
    Entry(
        "vllm.cross_layer",
        "gqa",
        "B L v t h e",
        Source(
            "LMCache",
            "0.5.6",
            "lmcache/v1/gpu_connector/kv_format/specs/nb_nl_two_bs_nh_hs.py",
            "vLLM's cross-layer cache is one tensor [B, L, 2, N, H, D]",
        ),
        Golden(LLAMA, 131_072, 65_536, 65_536, 2_097_152, 2_097_152_000),
        note="blocks packed across layers",
    ),
)

CPU_PAGE = (
    "the page of a head is 2N rows of D elements: the first N for K, the others for V; K is stored "
)
CPU = (
    Entry(
        "vllm.cpu_vec",
        "gqa",
        "L B h v e t",
        _wheel(
            "vllm/v1/attention/backends/cpu_attn.py; op cpu_attn_reshape_and_cache, isa vec and "
            "vec16, run on index-coded tensors of fp32 and bf16",
            CPU_PAGE + "transposed, element d of token t at d*N + t, V at t*D + d",
        ),
        Golden(SMOLLM, 46_080, 196_608, 19_660_800, 196_608, 589_824_000),
        value_axes="L B h v t e",
        note="a page of 128 cut in two does not hold K of 64 tokens in a row",
    ),
    Entry(
        "vllm.cpu_amx",
        "gqa",
        "L B h v t e t16 e2",
        Source(
            "vLLM",
            "main, commit 0e1ce523",
            "csrc/cpu/cpu_attn_amx.hpp (reshape_and_cache)",
            CPU_PAGE + "in groups of 16 tokens, in which pairs of elements stand token by token, "
            "V in groups of 16 elements, in which pairs of tokens stand element by element",
        ),
        Golden(
            Shape(num_layers=30, num_blocks=100, block_size=128, num_kv_heads=3, head_dim=64),
            23_040,
            98_304,
            9_830_400,
            98_304,
            294_912_000,
        ),
        value_axes="L B h v e t e16 t2",
        note="VNNI tiles of bf16; a block is a multiple of 32 tokens",
    ),
)

ENTRIES = (*PACKED, *APART, *CPU)
