"""Text of records: by name, or field by field with the arrangement of a page."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve

from kvflow.errors import LayoutError
from kvflow.layouts.arrangement import WORDS, Arrangement, as_arrangement
from kvflow.layouts.catalogue import Shape, entry
from kvflow.layouts.record import Field, Record, index_record, latent_record
from kvflow.layouts.text.scan import TextError, Word


def _catalogued(name: str) -> Record:
    """The record of a catalogue entry that holds one kind of it."""
    (component,) = entry(name).order(Shape(num_layers=1)).layout.spec.components
    return component.record


RECORDS: Mapping[str, Record] = MappingProxyType(
    {
        "fp8_ds_mla": latent_record("fp8", latent_rank=512, rope_dim=64),
        "bf16": latent_record("bfloat16", latent_rank=512, rope_dim=64),
        "fp8_index": index_record("fp8", index_dim=128),
        "bf16_index": index_record("bfloat16", index_dim=128),
        "nvfp4_ds_mla": _catalogued("vllm.nvfp4_ds_mla"),
        "dsv4": _catalogued("vllm.dsv4"),
        "dsv41": _catalogued("vllm.dsv41"),
    }
)
"""Records by the name that the language has for them, latent and indexer in GLM-5.3's sizes."""

_FIELD = re.compile(r"(\w+):([a-z0-9_]+?)x([0-9]+)(?:x([0-9]+)h)?")
_EXPECTED = f"a record: {', '.join(RECORDS)}, or (name:dtypexN,...)[order]"


def is_record(word: Word) -> bool:
    """Whether a word looks like a record: a name that is known, or fields in brackets."""
    return word.text.startswith("(") or word.text.partition("[")[0] in RECORDS


def read_record(word: Word) -> Record:
    """`NAME`, `NAME[order]` or `(name:dtypexN[xHh],...)[order]`; see `read_order`."""
    parts = _bracketed(word)
    base, order = (word, None) if parts is None else parts
    try:
        if base.text in RECORDS:
            named = RECORDS[base.text]
            return named if order is None else Record(named.fields, read_order(order))
        call = base.call()
        if call is None or call[0]:
            word.fail(_EXPECTED)
        fields = tuple(_field(a) for a in call[1])
        return Record(fields, "row" if order is None else read_order(order))
    except TextError:
        raise
    except LayoutError as error:
        word.fail(f"a lawful record, but {error}")


def _bracketed(word: Word) -> tuple[Word, Word] | None:
    if not word.text.endswith("]"):
        return None
    at = word.text.index("[")
    return word.sub(0, at), word.sub(at + 1, -1)


def _field(word: Word) -> Field:
    match = _FIELD.fullmatch(word.text)
    if match is None:
        word.fail("a field as name:dtypexN, or name:dtypexNxHh with H heads")
    counts = (word.sub(*match.span(i)).number("a count") if match[i] else 1 for i in (3, 4))
    return Field(match[1], match[2], *counts)


def read_order(word: Word) -> Arrangement:
    """`row`, `planar`, one order (`t h e`), or planes (`a,b: t f e | c: t e`); `%N` behind it
    rounds pages up to a multiple of N bytes."""
    body, _, multiple = word.text.partition("%")
    rounded = word.sub(len(body) + 1).number("a page multiple", 1) if multiple else 1
    said = body.strip()
    return evolve(as_arrangement(f"[{said}]" if ":" in said else said), page_multiple=rounded)


def format_record(record: Record) -> str:
    """The name of a record, else its fields, with its arrangement where that is not the usual."""
    for name, known in RECORDS.items():
        if known == record:
            return name
        if known.fields == record.fields:
            return f"{name}[{order_text(record)}]"
    fields = ",".join(
        f"{f.name}:{f.dtype}x{f.num_elements}" + (f"x{f.num_heads}h" if f.num_heads > 1 else "")
        for f in record.fields
    )
    return f"({fields})[{order_text(record)}]"


def order_text(record: Record) -> str:
    """The order of a record's pages, as it stands in brackets."""
    multiple = record.arrangement.page_multiple
    rounded = f" %{multiple}" if multiple > 1 else ""
    for order in (*WORDS, *(" ".join(plane.order) for plane in record.arrangement.planes)):
        if Record(record.fields, evolve(as_arrangement(order), page_multiple=multiple)) == record:
            return order + rounded
    return " | ".join(map(str, record.arrangement.planes)) + rounded
