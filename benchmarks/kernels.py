"""Rows per second of the row kernels and codecs, beside a memcpy of the same bytes.

    python benchmarks/kernels.py [--rows N] [--device cpu|cuda] [--threads T] [--repeats R]

Each line is measured in turns with its own memcpy (`copy_` of as many bytes as it writes,
pre-faulted), and reports the medians: rows per second, and time as a multiple of that memcpy.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from kvflow.kernels.codec import decode_index_key, decode_latent, encode_index_key, encode_latent
from kvflow.kernels.rows import PageView, gather_rows, scatter_rows
from kvflow.layouts.record import Record, index_record, latent_record

BLOCK_SIZE = 64
LATENT = latent_record("fp8", latent_rank=512, rope_dim=64)
INDEX = index_record("fp8", index_dim=128)

Case = tuple[str, int, Callable[[], object]]


def slots_of(order: str, n: int, device: torch.device) -> torch.Tensor:
    """n slots of a pool twice as large: a run, whole blocks in random order, or random rows."""
    if order == "run":
        slots = torch.arange(BLOCK_SIZE + 1, BLOCK_SIZE + 1 + n)
    elif order == "blocks":
        blocks = torch.randperm(2 * n // BLOCK_SIZE)[: -(-n // BLOCK_SIZE)]
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[:n]
    else:
        slots = torch.randperm(2 * n)[:n]
    return slots.to(device)


def move_cases(name: str, record: Record, n: int, device: torch.device) -> Iterator[Case]:
    num_blocks = -(-2 * n // BLOCK_SIZE) + 2
    stride = record.page_nbytes(BLOCK_SIZE)
    memory = torch.zeros(num_blocks * stride, dtype=torch.uint8, device=device)
    pages = PageView(memory, record, BLOCK_SIZE, stride)
    packed = torch.ones(n, record.nbytes, dtype=torch.uint8, device=device)
    nbytes = n * record.nbytes
    for order in ("run", "blocks", "random"):
        slots = slots_of(order, n, device)
        yield f"gather {name} {order}", nbytes, lambda s=slots: gather_rows(pages, s, packed)
        yield f"scatter {name} {order}", nbytes, lambda s=slots: scatter_rows(pages, s, packed)


def codec_cases(n: int, device: torch.device) -> Iterator[Case]:
    latent, rope = torch.randn(n, 512, device=device), torch.randn(n, 64, device=device)
    key = torch.randn(n, 128, device=device)
    latents, keys = encode_latent(LATENT, latent, rope), encode_index_key(INDEX, key)
    yield "encode latent", latents.numel(), lambda: encode_latent(LATENT, latent, rope)
    yield "decode latent", n * 576 * 4, lambda: decode_latent(LATENT, latents)
    yield "encode key", keys.numel(), lambda: encode_index_key(INDEX, key)
    yield "decode key", n * 128 * 4, lambda: decode_index_key(INDEX, keys)


def measure(nbytes: int, run: Callable[[], object], repeats: int, device: torch.device):
    """Median seconds of `run` and of its memcpy, taken in turns."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for kept, call in zip(times, (run, lambda: target.copy_(source)), strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                kept.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.rows < 1 or args.repeats < 1:
        parser.error(f"--rows {args.rows} and --repeats {args.repeats} must be at least 1")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    print(f"{args.rows} rows, {args.threads} thread(s), {device}, median of {args.repeats}")
    print(f"{'operation':24} {'Mrow/s':>8} {'GB/s':>7} {'x memcpy':>9}")
    cases = (
        *move_cases("latent", LATENT, args.rows, device),
        *move_cases("key", INDEX, args.rows, device),
        *codec_cases(args.rows, device),
    )
    for name, nbytes, run in cases:
        seconds, memcpy = measure(nbytes, run, args.repeats, device)
        rate, speed = args.rows / seconds / 1e6, nbytes / seconds / 1e9
        print(f"{name:24} {rate:8.2f} {speed:7.2f} {seconds / memcpy:9.2f}")


if __name__ == "__main__":
    main()
