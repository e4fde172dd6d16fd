"""A request with more rows than any program takes: cut into pieces that are queued like requests, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rsrv.core.shm.tensor import RegionTensor
from rsrv.serve.scheduler.queue import Result

if TYPE_CHECKING:
    from rsrv.core.shm.tensor import Tensor
    from rsrv.core.tensors import TensorSpec
    from rsrv.serve.scheduler.queue import Ticket

Piece = tuple[Mapping[str, "Tensor"], int]


def pieces(inputs: Mapping[str, Tensor], specs: Sequence[TensorSpec], rows: int, largest: int) -> list[Piece]:
    """The inputs and rows of ``ceil(rows / largest)`` requests: views along every input's own batch axis."""
    # An input in shared memory is read once here: its pieces would not be contiguous there.
    arrays = {name: value.read() if isinstance(value, RegionTensor) else value for name, value in inputs.items()}
    cut: list[Piece] = []
    for start in range(0, rows, largest):
        end = min(start + largest, rows)
        part: dict[str, Tensor] = {}
        for spec in specs:
            if spec.name in arrays:
                part[spec.name] = arrays[spec.name][(*(slice(None),) * (spec.batch_axis or 0), slice(start, end))]
        cut.append((part, end - start))
    return cut


class Joined:
    """The pieces of one request; `done` is called once, with their outputs put together or with the first error.

    Args:
        n: how many pieces there are.
        specs: what the outputs are.
        again: asked when all have run well, whether they are run again: they have to run on the same programs, and have
            not when others were selected since `selections`. What it raises ends the request.
    """

    def __init__(
        self,
        n: int,
        specs: Sequence[TensorSpec],
        done: Callable[[Result], None],
        again: Callable[[Joined], bool],
        selections: int,
    ) -> None:
        self._n = n
        self._specs = specs
        self._done = done
        self._again = again
        self._left = n
        self._results: list[Result] = [_NOT_YET] * n
        self._error: BaseException | None = None
        self.selections = selections
        self.tickets: list[Ticket] = []

    def restart(self, selections: int) -> None:
        """Make the pieces as if they had not run, on the programs of now."""
        self.selections = selections
        self._left = self._n
        for at, ticket in enumerate(self.tickets):
            ticket.done = self.done(at)

    def cancel(self) -> None:
        """As `Ticket.cancel`, for every piece."""
        for ticket in self.tickets:
            ticket.cancel()

    def done(self, at: int) -> Callable[[Result], None]:
        """The `done` of the piece at position `at`; like every other it is called on the dispatch thread."""

        def done(result: Result) -> None:
            self._results[at] = result
            self._left -= 1
            if result.error is not None and self._error is None:
                # What became of the others interests nobody any more.
                self._error = result.error
                self.cancel()
            if not self._left:
                try:
                    if self._error is None and self._again(self):
                        return
                    joined = self._join()
                except BaseException as error:
                    # No memory for the whole, most likely: whoever waits has to be told.
                    joined = Result(error=error)
                self._done(joined)

        return done

    def _join(self) -> Result:
        results = self._results
        joined = Result(
            error=self._error,
            queue_ns=max([result.queue_ns for result in results]),
            compute_ns=sum([result.compute_ns for result in results]),
            batch_key=max([result.batch_key for result in results]),
            batch_rows=sum([result.batch_rows for result in results]),
            upload_ns=sum([result.upload_ns for result in results]),
            download_ns=sum([result.download_ns for result in results]),
        )
        if self._error is None:
            joined.outputs = {}
            for spec in self._specs:
                parts = [result.outputs[spec.name] for result in results if result.outputs is not None]
                whole = joined.outputs[spec.name] = np.concatenate(parts, spec.batch_axis or 0)
                whole.setflags(write=False)
        return joined


_NOT_YET = Result()
