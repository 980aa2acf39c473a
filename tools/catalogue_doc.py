"""docs/catalogue.md from the catalogue of layouts.

``python tools/catalogue_doc.py`` writes the page; ``--check`` exits 1 if the committed one differs.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from kvflow.layouts.catalogue import CATALOGUE, Entry, Shape

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
PROJECTS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "dynamo": "NVIDIA Dynamo (KVBM)",
    "lmcache": "LMCache",
}
HOLDS = {
    "gqa": "keys, values",
    "mla_bf16": "latent bf16",
    "mla_fp8": "latent fp8",
    "mla_nvfp4": "latent NVFP4",
    "dsv4": "DeepSeek-V4 rows",
    "dsv41": "DeepSeek-V4.1 rows",
    "index_fp8": "indexer fp8",
    "dsa_fp8": "latent fp8, indexer fp8",
}

HEAD = """# Catalogue of layouts

How the systems of the field lay a KV cache out in memory. Each row is data in
`kvflow/layouts/catalogue/`; this page is written from it by `tools/catalogue_doc.py`. Every byte of
every entry is compared with index arithmetic written from its source
(`tests/layouts/test_catalogue.py`), and every entry is moved into another one, and another one into
it, by the executors (`tests/layouts/test_catalogue_moves.py`).

```python
from kvflow.layouts.catalogue import Shape, entry

order = entry("vllm.fp8_ds_mla").order(Shape(num_layers=79, num_blocks=1000, block_size=64))
pages = order.pages_of("latent.1")
assert (pages.region, pages.base, pages.block_stride) == ("kv", 41_984_000, 41_984)
```

**memory** lists the axes of the memory, slowest first: `L` layer, `B` block, `v` key or value, `w`
worker of a shared host row, `h` head, `t` token, `f` field, `e` element; `t16` is a tile of 16
tokens, `t*` one of a device block, `page` a page that the next column describes. What stands left
of a bar has a region each. **order of a page** is what one page of the record looks like
([decision 6](decisions/0006-orders-heads-copies.md)): `_2` is a hole in which another page stands.
The page of (layer, block) begins at layer * **layer stride** + block * **block stride**, in bytes,
at the numbers above each table; where the layer stride is "-" each layer has a region. **page** is
what one layer holds of one block.

That two entries hold the same components says that a plan exists between them, not that their bytes
mean the same: rope order, scale rounding and norms are content, which two engines compare when they
meet.
"""

TAIL = """
## Left out

Facts that the sources do not settle, or that need more than a layout:

- vLLM, one block of latent and indexer pages together (DeepSeek-V3.2, GLM, block outermost): the
  order of the two specs inside a block follows the order in which layers register.
- vLLM, LHBNC and BHLNC pages as ROCm's kernels split them; TurboQuant; tuples of vLLM-Ascend.
- SGLang, `page_first_kv_split` (Ascend), FP4 and MXFP8 pools, draft rows inside a token's entry.
- TensorRT-LLM, pools of NVFP4 scales, recurrent states and the second generation of its manager.
- Dynamo, alignments above 1; LMCache, serialised (compressed) formats.
"""


def shape_text(shape: Shape, family: str) -> str:
    held = ""
    if family == "gqa":
        heads = "1 head" if shape.num_kv_heads == 1 else f"{shape.num_kv_heads} heads"
        held = f", {heads} of {shape.head_dim} {shape.dtype}"
    index = f", {len(shape.indexed)} with an indexer" if shape.full_layers else ""
    blocks = f"{shape.num_blocks:,} blocks of {shape.block_size} tokens"
    return f"{shape.num_layers} layers{index}, {blocks}{held}"


def row(e: Entry) -> str:
    order, golden = e.order(e.golden.shape), e.golden
    kinds = list(dict.fromkeys(c.kind for c in order.layout.spec.components))
    orders = [str(order.record(f"{kind}.0").arrangement) for kind in kinds]
    said = orders[0] if len(set(orders)) == 1 else "; ".join(orders)
    if e.family == "gqa":
        orders = [text.partition(": ")[2].rstrip("]") or text for text in orders]
        said = orders[0] if len(set(orders)) == 1 else f"K {orders[0]}; V {orders[1]}"
    memory = f"`{e.axes}`" + (f"; V `{e.value_axes}`" if e.value_axes else "")
    layer = "-" if golden.layer_stride is None else f"{golden.layer_stride:,}"
    cells = [
        f"`{e.name}`",
        HOLDS[e.family],
        memory.replace("|", "\\|"),
        f"`{said}`".replace("|", "\\|"),
        f"{golden.page_nbytes:,}",
        layer,
        f"{golden.block_stride:,}",
        e.note,
    ]
    return "| " + " | ".join(cells) + " |"


def tables(entries: Iterable[Entry]) -> Iterator[str]:
    """One table for each shape in which golden numbers are stated."""
    for said, some in groupby(entries, key=lambda e: shape_text(e.golden.shape, e.family)):
        yield f"\n{said[0].upper()}{said[1:]}:\n"
        yield "| layout | holds | memory | order of a page | page | layer stride | block stride | |"
        yield "|---|---|---|---|---|---|---|---|"
        yield from map(row, some)


def sources(entries: Iterable[Entry]) -> Iterator[str]:
    by_source: dict[object, list[Entry]] = {}
    for e in entries:
        by_source.setdefault(e.source, []).append(e)
    yield "\nSources:\n"
    for some in by_source.values():
        source = some[0].source
        names = ", ".join(f"`{e.name}`" for e in some)
        yield f"- {names}: {source.project} {source.version}, {source.where}: {source.says}."


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip("\n")]
    for prefix, title in PROJECTS.items():
        entries = [e for e in CATALOGUE if e.name.startswith(prefix + ".")]
        lines += [f"\n## {title}", *tables(entries), *sources(entries)]
    return "\n".join([*lines, TAIL.rstrip("\n")]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args().check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
