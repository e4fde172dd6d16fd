"""Originals behind bundles: where they are found, and on which side of the hooks they stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import N, write_affine

from rsrv.bundle import open_bundle
from rsrv.core.dtypes import DType
from rsrv.core.errors import ExportError
from rsrv.export.reference import find_source, side_of


def test_the_source_of_a_bundle_is_found_by_its_name_and_later_ones_by_their_number(tmp_path: Path) -> None:
    roots = [tmp_path / root for root in "abcd"]
    for root in (roots[0], roots[2], roots[3]):
        (root / "net").mkdir(parents=True)
    (roots[1] / "own__dynamic").mkdir(parents=True)
    found = {name: find_source(roots, name) for name in ("net", "net__dynamic", "net__dynamic2", "own__dynamic")}
    assert found == {
        "net": roots[0] / "net",
        "net__dynamic": roots[2] / "net",
        "net__dynamic2": roots[3] / "net",
        "own__dynamic": roots[1] / "own__dynamic",
    }
    for name in ("other", "net__dynamic3", "net__dynamic1", "other__dynamic"):
        with pytest.raises(ExportError, match=f"there is no model '{name}' in ") as caught:
            find_source(roots, name)
        assert caught.value.hint == f"--exclude {name} leaves the bundle out"


class Fixed:
    """An original that takes these inputs; it is never called."""

    def __init__(self, *inputs: tuple[str, DType, int]) -> None:
        self.inputs = inputs

    def answering(self, specs: Sequence[Any]) -> Any:
        raise AssertionError


def test_names_kinds_and_ranks_of_its_inputs_tell_the_side_of_an_original(tmp_path: Path) -> None:
    hooks = "def preprocess(inputs): return inputs\n"
    client = {"client_inputs": {"x": ((N, 3), np.uint8)}, "client_outputs": {"y": ((N, 3), np.float32)}}
    hooked = open_bundle(write_affine(tmp_path / "hooked", batch_sizes=(1,), hooks=hooks, **client)).manifest
    plain = open_bundle(write_affine(tmp_path / "plain", batch_sizes=(1,))).manifest
    assert side_of(Fixed(("x", DType.F32, 2)), hooked) == "program"
    assert side_of(Fixed(("x", DType.I64, 2)), hooked) == "client"  # integers of any width
    assert side_of(Fixed(("x", DType.U8, 2), ("unused", DType.F32, 1)), hooked) == "client"
    assert side_of(Fixed(("z", DType.U8, 2)), hooked) == "program"
    assert side_of(Fixed(), hooked) == "client"  # the file of a repository
    assert side_of(Fixed(("x", DType.U8, 2)), plain) == "program"
