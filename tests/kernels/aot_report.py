"""Compiles the kernels with no GPU and reports what came out; run as a script, not collected.

The real launch path runs (`launch`, argument specialisation on real tensors, the compiler) under
a driver that names a target and can launch nothing. Prints one JSON object per kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget

from kvflow.kernels import triton_codec, triton_rows
from kvflow.kernels.formats import row_format
from kvflow.kernels.pages import PageView
from kvflow.kernels.stacks import packed
from kvflow.kernels.triton_rows import Side
from kvflow.layouts.arrangement import Arrangement
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.transfers.lower import paired_pieces

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
STARVED = {"maxnreg": 16}
DISASSEMBLED = ("gather latent 0", "gather index 0", "starved")
LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
DEEPSEEK_V4 = Record(
    (
        Field("latent", "float8_e4m3fn", 448),
        Field("rope", "bfloat16", 64),
        Field("scale", "uint8", 8),
    ),
    Arrangement.read("[latent,rope: t f e | scale: t e] %576"),
)


@dataclass
class CompileOnlyDriver:
    """What `JITFunction.warmup` asks of a driver."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def cuobjdump(kernel, *options: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        done = subprocess.run([tool, *options, f.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def sm_90(kernel) -> dict[str, int]:
    """Registers and stack of the machine code; accesses as PTX has them, because disassembling
    takes a second for each kernel (`machine_accesses` does it for a few)."""
    usage = cuobjdump(kernel, "-res-usage")
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", usage)}
    accesses = re.findall(r"\b(ld|st)\.global((?:\.[\w:]+)+)", kernel.asm["ptx"])
    wide = [kind for kind, width in accesses if re.search(r"\.v4\.[bfu]32|\.v2\.[bfu]64", width)]
    kinds = [kind for kind, _ in accesses]
    return {
        "registers": found["REG"],
        "spills": found["STACK"],
        "loads": kinds.count("ld"),
        "stores": kinds.count("st"),
        "wide_loads": wide.count("ld"),
        "wide_stores": wide.count("st"),
    }


def machine_accesses(kernel) -> dict[str, int]:
    """Accesses and spills of the machine code itself."""
    sass = cuobjdump(kernel, "-sass")
    ops = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass)
    return {
        "loads": sum(op.startswith("LDG") for op in ops),
        "stores": sum(op.startswith("STG") for op in ops),
        "wide_loads": sum(op.startswith("LDG") and ".128" in op for op in ops),
        "wide_stores": sum(op.startswith("STG") and ".128" in op for op in ops),
        "spills": sum(op.startswith(("LDL", "STL")) for op in ops),
    }


def gfx942(kernel) -> dict[str, int]:
    text = kernel.asm["amdgcn"]
    number = {
        name: int(n) for name, n in re.findall(r"\.(vgpr_count|[sv]gpr_spill_count):\s+(\d+)", text)
    }
    access = re.findall(r"\b(?:global|flat|buffer)_(load|store)_(\w+)", text)
    return {
        "registers": number["vgpr_count"],
        "spills": number["vgpr_spill_count"] + number["sgpr_spill_count"],
        "loads": sum(kind == "load" for kind, _ in access),
        "stores": sum(kind == "store" for kind, _ in access),
        "wide_loads": sum(kind == "load" and w.startswith("dwordx4") for kind, w in access),
        "wide_stores": sum(kind == "store" and w.startswith("dwordx4") for kind, w in access),
    }


def moves(name, src, dst, pairs):
    for number, it in enumerate(triton_rows.launches(src, dst, pairs, 64)):
        yield f"{name} {number}", triton_rows.move_kernel, it.args, it.constants, {}


def row_kernels(pages: PageView, name: str):
    slots = torch.zeros(64, dtype=torch.int64)
    rows = torch.zeros(64, pages.record.nbytes, dtype=torch.uint8)
    here, there = Side.of_pages(pages, slots), Side.of_rows(rows)
    pairs = packed(pages.pieces())
    yield from moves(f"gather {name}", here, there, pairs)
    yield from moves(f"scatter {name}", there, here, [(b, a) for a, b in pairs])


def repack_kernels(src: PageView, dst: PageView, name: str):
    slots = torch.zeros(64, dtype=torch.int64)
    here, there = Side.of_pages(src, slots), Side.of_pages(dst, slots)
    yield from moves(f"repack {name}", here, there, paired_pieces(src.geometry, dst.geometry))


def pages_of(record: Record, gap: int = 0, shift: int = 0, block_size: int = 64) -> PageView:
    """Pages that start `shift` bytes into an allocation."""
    stride = record.page_pitch(block_size) + gap
    memory = torch.zeros(shift + 4 * stride, dtype=torch.uint8)
    return PageView(memory, record, block_size, stride, shift)


def codec_kernels(dtype: torch.dtype):
    n, one_warp = 8, {"num_warps": 1}
    fmt = row_format(LATENT, "latent", "rope", 128)
    fused = torch.zeros(n, 576, dtype=dtype)
    packed = torch.zeros(n, 656, dtype=torch.uint8)
    args = (fused[:, :512], fused[:, 512:], packed, 576, 576)
    constants = triton_codec.constants(fmt)
    name = str(dtype).removeprefix("torch.")
    rule = {"POWER_OF_TWO": False}
    quantise, dequantise = triton_codec.quantise_kernel, triton_codec.dequantise_kernel
    yield f"quantise latent {name}", quantise, args, constants | rule, one_warp
    yield f"dequantise latent {name}", dequantise, (packed, fused), constants, one_warp
    fmt = row_format(index_record("fp8", index_dim=128), "key", None, None)
    key, packed = torch.zeros(n, 128, dtype=dtype), torch.zeros(n, 132, dtype=torch.uint8)
    constants, rule = triton_codec.constants(fmt), {"POWER_OF_TWO": True}
    args = (key, None, packed, 128, 0)
    yield f"quantise key {name}", quantise, args, constants | rule, one_warp
    yield f"dequantise key {name}", dequantise, (packed, key), constants, one_warp


OUTER_GAP = 3_502_592 - 41_984
HEADS = (Field("key", "bfloat16", 128, 8), Field("value", "bfloat16", 128, 8))


def cases():
    latent, index = pages_of(LATENT), pages_of(index_record("fp8", index_dim=128))
    outer = pages_of(LATENT, gap=OUTER_GAP, shift=41_984)
    nhd, hnd = (pages_of(Record(HEADS, order)) for order in ("t h e", "h t e"))
    tiled = pages_of(Record(HEADS[:1], "h e t t16 e2"))
    yield from row_kernels(latent, "latent")
    yield from row_kernels(outer, "latent outer")
    yield from row_kernels(pages_of(DEEPSEEK_V4), "584")
    yield from row_kernels(index, "index")
    yield from row_kernels(nhd, "NHD")
    yield from row_kernels(hnd, "HND")
    yield from row_kernels(tiled, "tiled")
    yield from repack_kernels(latent, pages_of(LATENT, block_size=16), "64 -> 16")
    yield from repack_kernels(index, pages_of(index.record, block_size=16), "index 64 -> 16")
    yield from repack_kernels(nhd, hnd, "NHD -> HND")
    yield from codec_kernels(torch.bfloat16)
    # Planted: a view 8 bytes off loses every 16-byte access, with no word from the compiler; and
    # a kernel that is denied registers spills.
    yield from row_kernels(pages_of(LATENT, shift=8), "misaligned")
    _, kernel, args, constants, options = next(codec_kernels(torch.bfloat16))
    yield "starved", kernel, args, constants, options | STARVED


def main(target: str) -> None:
    """One target per process: a kernel keeps what it compiled under its device."""
    warnings.simplefilter("ignore")
    triton.runtime.driver.set_active(CompileOnlyDriver(TARGETS[target]))
    for name, kernel, args, constants, options in cases():
        if target != "sm_90" and name == "starved":
            continue
        compiled = kernel.warmup(*args, **constants, **options, grid=(1,))
        report = sm_90(compiled) if target == "sm_90" else gfx942(compiled)
        if target == "sm_90" and name in DISASSEMBLED:
            report["machine"] = machine_accesses(compiled)
        print(json.dumps({"kernel": name} | report))


if __name__ == "__main__":
    main(sys.argv[1])
