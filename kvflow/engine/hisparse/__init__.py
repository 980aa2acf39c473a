"""HiSparse: decode with latents on the host, index keys and hot rows on the device."""

from kvflow.engine.hisparse.memory import HiSparseMemory as HiSparseMemory
from kvflow.engine.hisparse.shared import BlockCopy as BlockCopy
from kvflow.engine.hisparse.shared import plan_copies as plan_copies
from kvflow.engine.hisparse.sizes import HiSparseBytes as HiSparseBytes
from kvflow.engine.hisparse.sizes import HiSparseSizes as HiSparseSizes
from kvflow.engine.hisparse.sizes import hisparse_layout as hisparse_layout
