"""Rules across the parts of a manifest that was read: the validate phase of §1.14, in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rsrv.bundle.problems import Problems, violation
from rsrv.core.errors import BundleError
from rsrv.core.shapes import MAX_EXTENT
from rsrv.core.tensors import TensorSpec

if TYPE_CHECKING:
    from rsrv.bundle.manifest import Manifest

INPUTS, OUTPUTS = "executable_inputs", "executable_outputs"
CLIENT_INPUTS, CLIENT_OUTPUTS = "client_inputs", "client_outputs"


def validate(manifest: Manifest, *, has_hooks: bool, declares_variants: bool, problems: Problems) -> None:
    """Add what is wrong with `manifest` as a whole. Nothing is concluded from a part that could not be read."""
    if manifest.is_meta:
        _meta_rules(manifest, has_hooks, declares_variants, problems)
    _unique_names(manifest.executable_inputs, INPUTS, problems)
    _unique_names(manifest.executable_outputs, OUTPUTS, problems)
    _all_or_nothing(manifest, problems)
    _batch_sizes(manifest, problems)
    if not manifest.is_meta:
        _variants(manifest, declares_variants, problems)
        _client_lists(manifest, has_hooks, problems)
    _unique_names(manifest.client_inputs or (), CLIENT_INPUTS, problems)
    _unique_names(manifest.client_outputs or (), CLIENT_OUTPUTS, problems)
    _wire_dtypes(manifest, problems)


def _meta_rules(manifest: Manifest, has_hooks: bool, declares_variants: bool, problems: Problems) -> None:
    if not has_hooks:
        problems.add("B-52", f"kind: meta: {manifest.name!r} has no model.py, which has to define run(inputs, call)")
    seen: set[str] = set()
    for i, call in enumerate(manifest.meta_calls):
        at = ("meta", "calls", i)
        if call in seen:
            problems.add("B-52", f"meta.calls lists {call!r} twice", at=at)
        if call == manifest.name:
            problems.add("B-52", f"meta.calls lists {call!r}, the bundle itself", at=at)
        seen.add(call)
    for key, specs in ((CLIENT_INPUTS, manifest.client_inputs), (CLIENT_OUTPUTS, manifest.client_outputs)):
        if not specs and not problems.touched(key):
            problems.add("B-52", f"kind: meta needs {key} with at least one tensor", at=(key,))
    if declares_variants:
        problems.add("B-45", "kind: meta cannot have input_shapes", at=("input_shapes",))


def _unique_names(specs: Sequence[TensorSpec], key: str, problems: Problems) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.add("B-26", f"{key} has two tensors named {spec.name!r}", at=(key,))
        seen.add(spec.name)


def _all_or_nothing(manifest: Manifest, problems: Problems) -> None:
    unbatched = [spec.name for spec in manifest.executable_inputs if spec.batch_axis is None]
    if unbatched and len(unbatched) < len(manifest.executable_inputs):
        problems.add(
            "B-36",
            f"executable inputs without a batch axis beside batched ones: {', '.join(map(repr, unbatched))}",
            at=(INPUTS,),
            hint="give every executable input a batch letter ('n'), or none",
        )


def _batch_sizes(manifest: Manifest, problems: Problems) -> None:
    sizes, dynamic = manifest.batching.compiled_batch_sizes, manifest.batching.dynamic
    at = ("batching", "compiled_batch_sizes")
    for size in sizes:
        if not 0 < size <= MAX_EXTENT:
            problems.add("B-31", f"batching.compiled_batch_sizes has {size}, want integers above 0", at=at)
    for size in sorted(size for size, count in Counter(sizes).items() if count > 1):
        problems.add("B-31", f"batching.compiled_batch_sizes has {size} twice", at=at)
    if problems.touched("batching"):
        return
    if dynamic and not sizes:
        problems.add("B-12a", "batching.dynamic is true, but compiled_batch_sizes is empty", at=at)
    if manifest.input_batch_dim is not None or manifest.is_meta or problems.touched(INPUTS):
        return
    if dynamic:
        problems.add("B-12a", "batching.dynamic is true, but no executable input has a batch axis", at=at)
    elif len(sizes) > 1:
        problems.add(
            "B-35", f"batching.compiled_batch_sizes is {list(sizes)}, but no executable input has a batch axis", at=at
        )


def _variants(manifest: Manifest, declared: bool, problems: Problems) -> None:
    axes = manifest.variable_axes
    if axes and not manifest.input_shapes and not problems.touched("input_shapes"):
        names = ", ".join(axis.qualified for axis in axes)
        state = "is empty" if declared else "is missing"
        problems.add("B-45", f"input_shapes {state}, but these axes are variable: {names}", at=("input_shapes",))
    for key in manifest.input_shapes:
        if len(key) != len(axes) and not problems.touched(INPUTS):
            problems.add("B-45", f"input_shapes has {list(key)} for {len(axes)} variable axes", at=("input_shapes",))


def _client_lists(manifest: Manifest, has_hooks: bool, problems: Problems) -> None:
    if has_hooks:
        return
    for key, specs in ((CLIENT_INPUTS, manifest.client_inputs), (CLIENT_OUTPUTS, manifest.client_outputs)):
        if specs is not None:
            problems.add(
                "B-50",
                f"{key} is there, but {manifest.name!r} has no model.py that could transform the tensors",
                at=(key,),
                hint="add a hook file, or remove the list",
            )


def _wire_dtypes(manifest: Manifest, problems: Problems) -> None:
    lists = (
        (CLIENT_INPUTS if manifest.client_inputs is not None else INPUTS, manifest.wire_inputs),
        (CLIENT_OUTPUTS if manifest.client_outputs is not None else OUTPUTS, manifest.wire_outputs),
    )
    for key, specs in lists:
        for spec in specs:
            if spec.dtype.wire is None:
                problems.add(
                    "B-51",
                    f"{key} {spec.name!r}: {spec.dtype.value} has no KServe datatype, so no client can send or read it",
                    at=(key,),
                    hint="convert inside the program, or declare client tensors and convert in a hook",
                )


def meta_call_problems(manifests: Mapping[str, Manifest]) -> dict[str, BundleError]:
    """Bundles, by name, that break the rule that a meta must not call a meta (B-53), each with its error."""
    problems: dict[str, BundleError] = {}
    for name, manifest in manifests.items():
        for call in manifest.meta_calls:
            if call in manifests and manifests[call].is_meta:
                problems[name] = violation(
                    BundleError,
                    "B-53",
                    f"bundle {name!r}: meta.calls lists {call!r}, which is a meta itself",
                    file="manifest.yaml",
                    hint="a meta calls models only",
                )
                break
    return problems


def internal_names(manifests: Iterable[Manifest]) -> frozenset[str]:
    """Models that some meta calls: hidden from the repository index and from placement (B-53)."""
    return frozenset(call for manifest in manifests for call in manifest.meta_calls)
