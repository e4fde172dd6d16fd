from __future__ import annotations

import pytest

from rsrv.core.errors import ExportError
from rsrv.export.axes import output_batch_axis


def test_the_axis_that_follows_the_batch_size_is_found_wherever_it_is() -> None:
    assert output_batch_axis("y", {1: (1, 4), 3: (3, 4)}) == 0
    assert output_batch_axis("y", {2: (4, 2), 8: (4, 8)}) == 1
    assert output_batch_axis("y", {4: (4, 4), 8: (8, 4)}) == 0


def test_an_output_that_does_not_change_is_unbatched() -> None:
    assert output_batch_axis("y", {1: (4,), 2: (4,)}) is None
    assert output_batch_axis("y", {1: (), 2: ()}, None) is None


def test_a_declared_axis_is_accepted_when_it_is_the_one_that_changes() -> None:
    assert output_batch_axis("y", {1: (5, 1), 2: (5, 2)}, -1) == 1
    assert output_batch_axis("y", {1: (5, 1), 2: (5, 2)}, 1) == 1


@pytest.mark.parametrize(
    ("shapes", "declared", "says"),
    [
        ({1: (1, 1), 2: (2, 2)}, 0, "2 axes that change"),
        ({1: (4, 3), 2: (8, 3)}, 0, "axis 0 of output 'y' is not the batch size itself: [4, 3] at 1, [8, 3] at 2"),
        ({1: (1, 3), 2: (3,)}, 0, "changes its rank"),
        ({1: (1, 3), 2: (2, 3)}, 1, "declared with batch axis 1, but axis 0 changes"),
        ({1: (1, 3), 2: (2, 3)}, None, "declared with no batch axis, but axis 0 changes"),
        ({1: (3,), 2: (3,)}, 0, "declared with batch axis 0, but no axis changes"),
        ({1: (1,), 2: (2,)}, 1, "rank 1 and no axis 1"),
        ({1: (), 2: ()}, 0, "rank 0 and no axis 0"),
    ],
)
def test_a_wrong_axis_is_refused_with_the_shapes(shapes: dict[int, tuple[int, ...]], declared: int, says: str) -> None:
    with pytest.raises(ExportError) as raised:
        output_batch_axis("y", shapes, declared)
    assert says in raised.value.message
