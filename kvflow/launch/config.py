"""LaunchConfig: everything a deployment is started from. Resolved once, handed to every rank."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import field, frozen
from attrs.converters import optional

from kvflow.engine.access import AccessOptions
from kvflow.engine.deployment import Deployment
from kvflow.engine.front.options import FrontOptions
from kvflow.engine.hisparse import HiSparseSizes, hisparse_layout
from kvflow.engine.mailbox import Hub
from kvflow.engine.prefix.config import PrefixConfig
from kvflow.engine.tiers.unitfile import FileMover
from kvflow.errors import LayoutError
from kvflow.layouts.layout import KVLayout
from kvflow.layouts.mesh import Axis, Mesh
from kvflow.layouts.paging import Paged
from kvflow.layouts.record import KVDType
from kvflow.layouts.sharding import RoundRobin
from kvflow.layouts.spec import KVCacheSpec
from kvflow.layouts.values import integer, not_negative, positive
from kvflow.transfers.cost import Costs

Transport = Literal["nixl", "in-process"]
Direction = Literal["pull", "push"]
ComputeDType = Literal["float32", "float64"]

MAX_NUM_DRAFTS = 4
"""The most tokens that the MTP layer drafts a step."""


@frozen
class LaunchConfig:
    """Sizes are in tokens. ``pcp`` x ``tp`` prefill ranks; ``dcp`` shards their cache over the same
    ranks and divides their number. ``decode_ranks`` data-parallel decode groups; in each,
    ``decode_tp`` ranks share the heads and ``decode_dcp`` the cache: the larger is the number of
    ranks of a group, and a multiple of the smaller. ``num_drafts`` tokens a decode step tries. With
    ``hisparse`` latent KV of decode lies on the host, and its hot part on the device in at most
    ``hisparse_device_nbytes``. There are ``prefill_engines``, each of its own ranks. With
    ``streaming`` decode reads a prompt's rows while it is computed, step by step or every
    ``stream_layers`` layers of a step too; with ``loans`` engines take what decode engines hold of
    a prompt, and a decode engine may compute ``local_prefill_tokens`` of one itself. ``transfer``
    says who moves a prompt's rows: its reader or who computed it. Raises `LayoutError` for values
    that are wrong for every model;
    `kvflow.launch.checks.check_launch` holds them against this one."""

    model: Path = field(converter=Path)
    pcp: int = field(default=1, converter=integer, validator=positive)
    dcp: int = field(default=1, converter=integer, validator=positive)
    interleave: int = field(default=1, converter=integer, validator=positive)
    tp: int = field(default=1, converter=integer, validator=positive)
    decode_ranks: int = field(default=1, converter=integer, validator=positive)
    decode_tp: int = field(default=1, converter=integer, validator=positive)
    decode_dcp: int = field(default=1, converter=integer, validator=positive)
    decode_interleave: int = field(default=1, converter=integer, validator=positive)
    prefill_block: int = field(default=64, converter=integer, validator=positive)
    decode_block: int = field(default=64, converter=integer, validator=positive)
    kv_dtype: KVDType = "fp8"
    dtype: ComputeDType = "float32"
    max_model_len: int = field(default=8192, converter=integer, validator=positive)
    max_num_batched_tokens: int = field(default=2048, converter=integer, validator=positive)
    max_num_seqs: int = field(default=64, converter=integer, validator=positive)
    num_drafts: int = field(default=0, converter=integer, validator=not_negative)
    hisparse: bool = False
    hisparse_device_nbytes: int | None = field(default=None, converter=optional(integer))
    prefill_kv_tokens: int = field(default=32768, converter=integer, validator=positive)
    decode_kv_tokens: int = field(default=32768, converter=integer, validator=positive)
    transport: Transport = "nixl"
    verify_transfers: bool = False
    transfer_costs: Path | None = field(default=None, converter=optional(Path))
    served_model_name: str = ""
    prefix: PrefixConfig = field(factory=PrefixConfig)
    access: AccessOptions = field(factory=AccessOptions)
    decode_access: AccessOptions = field(factory=AccessOptions)
    prefill_engines: int = field(default=1, converter=integer, validator=positive)
    streaming: bool = True
    loans: bool = True
    local_prefill_tokens: int = field(default=0, converter=integer, validator=not_negative)
    transfer: Direction = "pull"
    stream_layers: int = field(default=0, converter=integer, validator=not_negative)

    def __attrs_post_init__(self) -> None:
        for name, choices in (
            ("kv_dtype", KVDType),
            ("dtype", ComputeDType),
            ("transport", Transport),
            ("transfer", Direction),
        ):
            if getattr(self, name) not in get_args(choices):
                raise LayoutError(
                    f"{name} = {getattr(self, name)!r}, must be one of {list(get_args(choices))}"
                )
        if self.prefill_size % self.dcp:
            raise LayoutError(
                f"dcp {self.dcp} must divide pcp {self.pcp} x tp {self.tp}: it adds no ranks"
            )
        if self.decode_size % min(self.decode_tp, self.decode_dcp):
            raise LayoutError(
                f"decode_tp {self.decode_tp} and decode_dcp {self.decode_dcp}: one must divide the "
                f"other, they share ranks"
            )
        for name in ("prefill_kv_tokens", "decode_kv_tokens"):
            if getattr(self, name) < self.max_model_len:
                raise LayoutError(
                    f"{name} = {getattr(self, name)} is below max_model_len {self.max_model_len}"
                )
        if self.num_drafts > MAX_NUM_DRAFTS:
            raise LayoutError(f"num_drafts = {self.num_drafts}, must be at most {MAX_NUM_DRAFTS}")
        if self.max_model_len < 2:
            raise LayoutError(
                f"max_model_len = {self.max_model_len}, must be at least 2: a token of a prompt "
                f"and one that is generated"
            )
        if self.stream_layers and not self.streaming:
            raise LayoutError(
                f"stream_layers = {self.stream_layers} without streaming, must be 0: rows are read "
                f"when a prompt is computed"
            )
        self._check_name()
        self._check_hisparse()
        self._check_costs()

    def _check_name(self) -> None:
        name = self.served_model_name or self.model.name
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise LayoutError(
                f"served_model_name = {self.served_model_name!r} of model = {str(self.model)!r}, "
                f"the name must be text of UTF-8: {error}"
            ) from error

    def _check_hisparse(self) -> None:
        nbytes = self.hisparse_device_nbytes
        if nbytes is not None and not self.hisparse:
            raise LayoutError(f"hisparse_device_nbytes = {nbytes} without hisparse limits nothing")
        if nbytes is not None and nbytes < 1:
            raise LayoutError(f"hisparse_device_nbytes = {nbytes}, must be at least 1")

    def _check_costs(self) -> None:
        path = self.transfer_costs
        if path is not None and self.transport == "in-process":
            raise LayoutError(
                f"transfer_costs = {str(path)!r} with transport = 'in-process', must be 'nixl': "
                f"nothing else goes by costs"
            )
        if path is not None and not path.is_file():
            raise LayoutError(f"transfer_costs = {str(path)!r}, must be a file")

    @property
    def prefill_size(self) -> int:
        """Ranks of the prefill engine."""
        return self.pcp * self.tp

    @property
    def decode_size(self) -> int:
        """Ranks of one decode group."""
        return max(self.decode_tp, self.decode_dcp)

    @property
    def prefill_mesh(self) -> Mesh:
        """DCP acts on the PCP x TP ranks."""
        over = ("pcp", "tp")
        return Mesh((Axis("pcp", self.pcp), Axis("tp", self.tp), Axis("dcp", self.dcp, over=over)))

    @property
    def decode_mesh(self) -> Mesh:
        """Requests are dealt to "home" groups of TP ranks; DCP acts on all ranks."""
        home, dcp = self.decode_size // self.decode_tp, self.decode_dcp
        over = ("home", "tp")
        return Mesh((Axis("home", home), Axis("tp", self.decode_tp), Axis("dcp", dcp, over=over)))

    @property
    def prefill_homes(self) -> tuple[tuple[int, ...], ...]:
        """The prefill ranks that compute the same tokens, of different heads."""
        return self.prefill_mesh.ranks_by_shard("pcp")

    @property
    def decode_homes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of a decode group that compute the same requests, of different heads."""
        return self.decode_mesh.ranks_by_shard("home")

    def prefill_layout(self, spec: KVCacheSpec) -> KVLayout:
        """Round-robin over the DCP axis; ranks with one DCP coordinate are replicas."""
        deal = RoundRobin(self.dcp, self.interleave)
        placement = self.prefill_mesh.place(deal, "dcp")
        return KVLayout.uniform(spec, placement, Paged(self.prefill_block))

    def decode_layout(self, spec: KVCacheSpec) -> KVLayout:
        """Every token of a group's requests on one of its ranks; on each without DCP."""
        deal = RoundRobin(self.decode_dcp, self.decode_interleave)
        placement = self.decode_mesh.place(deal, "dcp")
        if self.hisparse:
            return hisparse_layout(spec, placement, self.decode_block)
        return KVLayout.uniform(spec, placement, Paged(self.decode_block))

    def hisparse_sizes(self, topk: int) -> HiSparseSizes:
        """What the device holds of the latent rows of a model that chooses `topk` a query."""
        return HiSparseSizes.for_drafts(
            topk, self.max_num_seqs, self.num_drafts, device_nbytes=self.hisparse_device_nbytes
        )

    @property
    def prefill_groups(self) -> dict[str, tuple[str, ...]]:
        """The ranks of each prefill engine in rank order, by engine."""
        names = [f"prefill-{e}" for e in range(self.prefill_engines)]
        return {n: (n, *(f"{n}.{r}" for r in range(1, self.prefill_size))) for n in names}

    @property
    def prefill_names(self) -> tuple[str, ...]:
        """All prefill ranks, engine by engine."""
        return tuple(name for names in self.prefill_groups.values() for name in names)

    @property
    def decode_names(self) -> tuple[str, ...]:
        """The leaders of the decode groups, which the front talks to."""
        return tuple(f"decode-{r}" for r in range(self.decode_ranks))

    def decode_group(self, name: str) -> tuple[str, ...]:
        """All ranks of a decode group by its leader's name, which comes first."""
        return (name, *(f"{name}.{r}" for r in range(1, self.decode_size)))

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    def deployment(
        self,
        hub: Hub,
        files: FileMover | None = None,
        hosts: Mapping[str, str] | None = None,
        host: str = "",
    ) -> Deployment:
        """The front of this deployment on `host`, not started. `files` serves a disk tier; `hosts`
        says where engines run, by name, if not there."""
        return Deployment(
            hub,
            self.prefill_groups,
            self.decode_names,
            self.eos_ids(),
            self.model_name,
            self.max_model_len,
            self.vocab_size(),
            self.max_num_batched_tokens,
            prefix=self.prefix,
            files=files,
            options=FrontOptions(
                self.unit_size,
                self.streaming,
                self.loans,
                self.local_prefill_tokens,
                self.prefill_kv_tokens,
                self.decode_kv_tokens,
                self.transfer == "push",
                hosts or {},
                host,
            ),
        )

    @property
    def unit_size(self) -> int:
        """Tokens of a block of chains, by which all engines know prefixes."""
        return self.prefix.block_size or self.prefill_block

    @property
    def decode_prefix(self) -> PrefixConfig:
        """Decode engines keep prefixes on their ranks alone."""
        return PrefixConfig(True, self.unit_size) if self.prefix.enabled else self.prefix

    def costs(self) -> Costs:
        """What the choice of a way to transfer goes by: measured ones, or the defaults. Raises
        `PlanError` for a file of something else."""
        return Costs.from_json(self.transfer_costs.read_bytes()) if self.transfer_costs else Costs()

    def vocab_size(self) -> int:
        """Token ids of the model are in [0, vocab_size)."""
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the model's generation config, else of its config."""
        for name in ("generation_config.json", "config.json"):
            path = self.model / name
            if path.exists():
                ids: Any = json.loads(path.read_text()).get("eos_token_id")
                if ids is not None:
                    return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()
