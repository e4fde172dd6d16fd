"""Custom calls that the compiler itself understands: code outside of StableHLO that no server has to bring."""

COMPILER_CALLS = frozenset(
    {
        "AllocateBuffer",
        "ApproxTopK",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "TopK",
        "annotate_device_placement",
        "mhlo.erf",
        "mhlo.tan",
        "mhlo.topk",
        "shape_assertion",
    }
)
"""On every platform; none of them multiplies matrices."""
