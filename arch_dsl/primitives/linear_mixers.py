"""The published linear mixers, as names for settings of `linear_attention`."""

from __future__ import annotations

from archlab.arch_dsl.parts.families import Branch

_SILU_CONV = {"type": "short_conv", "activation": "silu"}
_GATED = [{"type": "rmsnorm"}, {"type": "gate", "activation": "silu"}]
# RetNet, arXiv:2307.08621, eq. 5 to 8
Branch.alias(
    "retnet",
    type="linear_attention",
    value_dim="2x",
    decay="constant",
    query=["rope"],
    key=["rope"],
    sdpa=["groupnorm", {"type": "gate", "activation": "silu"}],
)
# lightning attention of MiniMax-01, arXiv:2501.08313, section 2.2.2
_SILU_MAP = {"type": "feature_map", "function": "silu"}
Branch.alias(
    "lightning_attention",
    type="linear_attention",
    scale=1.0,
    decay="lightning",
    query=[_SILU_MAP],
    key=[_SILU_MAP],
    value=[_SILU_MAP],
    sdpa=[{"type": "rmsnorm", "over": "heads"}, {"type": "gate"}],
)
# gated linear attention, arXiv:2312.06635, section 4.4
Branch.alias(
    "gla",
    type="linear_attention",
    head_dim="0.5x",
    value_dim="1x",
    decay="low_rank",
    sdpa=_GATED,
)
# HGRN2, arXiv:2404.07904, section 3
Branch.alias(
    "hgrn2",
    type="linear_attention",
    decay="lower_bounded",
    keys="decay",
    query=[{"type": "feature_map", "function": "silu"}],
    sdpa=[{"type": "rmsnorm", "over": "heads"}],
)
# DeltaNet, arXiv:2406.06484, section 3.3
Branch.alias(
    "delta_net",
    type="linear_attention",
    rule="delta",
    query=[_SILU_CONV, "l2norm"],
    key=[_SILU_CONV, "l2norm"],
    value=[_SILU_CONV],
    sdpa=["rmsnorm"],
)
# gated DeltaNet, arXiv:2412.06464, section 3.4
Branch.alias(
    "gated_delta_net",
    type="linear_attention",
    rule="delta",
    decay={"type": "mamba2", "step": False, "a_min": 0.0},
    query=[_SILU_CONV, "l2norm"],
    key=[_SILU_CONV, "l2norm"],
    value=[_SILU_CONV],
    sdpa=_GATED,
)
# Kimi Delta Attention, arXiv:2510.26692, section 4
Branch.alias(
    "kda",
    type="linear_attention",
    rule="delta",
    decay="kda",
    query=[_SILU_CONV, "l2norm"],
    key=[_SILU_CONV, "l2norm"],
    value=[_SILU_CONV],
    sdpa=[{"type": "rmsnorm"}, {"type": "gate", "rank": "head_dim"}],
)
# Mamba-2, arXiv:2405.21060, section 7.1: queries are C, keys B, values x, the gate z; no feed-forward branch beside it
_MAMBA2_CONV = {**_SILU_CONV, "bias": True}
Branch.alias(
    "mamba2",
    type="linear_attention",
    heads="2x",
    key_heads=1,
    head_dim=128,
    value_dim=64,
    scale=1.0,
    decay="mamba2",
    skip=True,
    query=[_MAMBA2_CONV],
    key=[_MAMBA2_CONV],
    value=[_MAMBA2_CONV],
    sdpa=[{"type": "gate", "activation": "silu"}, {"type": "rmsnorm", "over": "heads", "eps": 1e-5}],
)
