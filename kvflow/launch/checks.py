"""check_launch: what only the model and the file system can say against a configuration."""

import os

from kvflow.engine.hisparse import HiSparseBytes
from kvflow.engine.tiers.memory import unit_nbytes, units_that_fit
from kvflow.engine.tiers.unitfile import most_file_nbytes
from kvflow.errors import CapacityError, LayoutError
from kvflow.launch.config import LaunchConfig
from kvflow.layouts.spec import KVCacheSpec
from kvflow.models.config import ConfigError, GlmConfig


def check_launch(config: LaunchConfig) -> None:
    """Reads the model's ``config.json`` and the file of costs, and makes the directory of a disk
    tier: call it before any rank starts. Raises `ConfigError` for a model that kvflow cannot run,
    `LayoutError` for a value that does not fit this one, `CapacityError` for memory that is too
    small for it, and `PlanError` for a file that holds no costs."""
    model = _model(config)
    spec = model.kv_spec(kv_dtype=config.kv_dtype)
    heads, mtp = model.num_attention_heads, model.num_nextn_predict_layers
    for name, size in ("tp", config.tp), ("decode_tp", config.decode_tp):
        if heads % size:
            raise LayoutError(f"{name} = {size} must divide num_attention_heads = {heads}")
    if config.num_drafts and not mtp:
        raise LayoutError(
            f"num_drafts = {config.num_drafts}, must be 0: the MTP layer drafts, and the model "
            f"has num_nextn_predict_layers = {mtp}"
        )
    _check_hisparse(config, spec, model.index_topk)
    _check_tiers(config, spec)
    config.costs()


def _model(config: LaunchConfig) -> GlmConfig:
    try:
        return GlmConfig.load(config.model)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"model = {str(config.model)!r}, must hold a config.json of a model: {error}"
        ) from error


def _check_hisparse(config: LaunchConfig, spec: KVCacheSpec, topk: int) -> None:
    if not config.hisparse:
        return
    layout = config.decode_layout(spec)
    num_blocks = layout.num_blocks_for(config.decode_kv_tokens)
    try:
        HiSparseBytes.of(layout, num_blocks, config.hisparse_sizes(topk))
    except CapacityError as error:
        raise CapacityError(
            f"hisparse_device_nbytes = {config.hisparse_device_nbytes}: {error}"
        ) from error


def _check_tiers(config: LaunchConfig, spec: KVCacheSpec) -> None:
    prefix = config.prefix
    if not prefix.host_nbytes:
        return
    unit_size = prefix.unit_size(config.prefill_layout(spec))
    try:
        units_that_fit(spec, unit_size, prefix.host_nbytes)
    except CapacityError as error:
        raise CapacityError(f"host_nbytes = {prefix.host_nbytes}: {error}") from error
    if (directory := prefix.disk_directory) is None:
        return
    need = most_file_nbytes(unit_nbytes(spec, unit_size), unit_size)
    if prefix.disk_nbytes < need:
        raise CapacityError(
            f"disk_nbytes = {prefix.disk_nbytes}, must be at least {need}: the file of one unit of "
            f"{unit_size} tokens"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayoutError(
            f"disk_directory = {str(directory)!r}, must be a directory or one to make: {error}"
        ) from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise LayoutError(f"disk_directory = {str(directory)!r}, must be readable and writable")
