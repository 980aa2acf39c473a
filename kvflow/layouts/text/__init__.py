"""Layouts as texts and back: the language of the command line, of messages and of drawings.

A text is words with spaces between them: where tokens go, how ranks page them, what is held.

===========================================  =====================================================
word                                         says
===========================================  =====================================================
``dcp8(i=16)``                               round robin over 8 ranks, 16 tokens each (i=1: default)
``replicated``, ``replicated(4)``            every token on one rank, on each of 4 ranks
``pcp4*dcp2@pcp(i=16)``                      axes, slowest first; dcp folds over pcp: 4 ranks,
                                             2 shards, each on 2 ranks
``pcp2*dcp2(i=4)``                           4 ranks; dcp deals, pcp replicates
``(pcp2*dcp2)(i=4)``                         4 ranks, 4 shards: both axes deal together
``balanced(4,0:100)``, ``contiguous(4,0:9)`` chunks of an interval; ``replicated(0:100)`` too
``dcp2(i=1) on 3,1|0``                       shard 0 on ranks 3 and 1, shard 1 on rank 0
``paged(64)``, ``pool(64)``, ``dense(99)``   pages of 64 tokens, host pages, one block
``latent:pool(64) indexer:paged(64)``        two groups, one for each kind of component
``a[latent.0-3,all.7]:paged(4)``             a group by name and members
``glm-5.3/fp8``, ``glm-5.3/bfloat16/row``    what a model caches; indexer pages as rows
``gqa(4,8,128)/bfloat16[h t e]``             keys and values: layers, heads, head size, page order
``fp8_ds_mla``, ``bf16[t e]``                one component with this record; its page's order
``{latent.0-2:bf16,indexer.0:fp8_index}``    components, in layer order; ``latent.3@mtp:``
``content(model=x,weights=sha)``             what the bytes mean, beyond what the model says
``heads(0|1|2-3)``                           ranks by TP coordinate, heads dealt contiguously
``stages(all.0-38 on 0-3|all.39-78 on 4-7)`` layers split over ranks
``hosts(0-3|4-7)``                           ranks that can copy to each other without a link
===========================================  =====================================================

`format_layout` writes the short form, which gives the same value when read. Shardings, placements
and pagings print longer words (``round_robin(8,i=16)``), and those are read as well. The names of
axes only say which ranks share a shard: a value does not keep them, and ``tp4*dcp2@tp`` comes back
as ``pcp4*dcp2@pcp``.
"""

from kvflow.layouts.text.layouts import format_layout, parse_layout, parse_members, parse_spec
from kvflow.layouts.text.members import format_members
from kvflow.layouts.text.placement import format_paging, format_placement
from kvflow.layouts.text.records import RECORDS, format_record
from kvflow.layouts.text.scan import TextError
from kvflow.layouts.text.specs import MODELS, format_spec

__all__ = [
    "MODELS",
    "RECORDS",
    "TextError",
    "format_layout",
    "format_members",
    "format_paging",
    "format_placement",
    "format_record",
    "format_spec",
    "parse_layout",
    "parse_members",
    "parse_spec",
]
