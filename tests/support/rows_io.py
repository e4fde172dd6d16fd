"""A dataset whose right answers are known: for servers of which we know only a model y = 2x + 1 of f32[-1,4]."""

import numpy as np

from rsrv.client import InferenceIO, InferOutput, OutputSpec, pool_view, scratch


class Rows(InferenceIO):
    """Item `i` is ``[4i, 4i+1, 4i+2, 4i+3]``; `requests` has the items of each request, `then` runs at item `at`."""

    def __init__(self, items, at=None, then=None):
        self.x = np.arange(items * 4, dtype=np.float32).reshape(items, 4)
        self.y = np.full_like(self.x, np.nan)
        self.requests = []
        self.at, self.then = at, then

    def __len__(self):
        return len(self.x)

    def item_input_bytes(self):
        return 16

    def output_specs(self):
        return [OutputSpec("y", np.float32, (4,))]

    def encode_chunk(self, rows, slot):
        if rows.start == self.at:
            self.then()
        x = scratch(slot, "x", (len(rows), 4), np.float32)
        pool_view(x)[:] = self.x[rows.start : rows.stop]
        return x

    def decode_chunk(self, rows, response):
        self.requests.append(len(rows))
        self.y[rows.start : rows.stop] = InferOutput("y", response, np.float32)

    def is_right(self):
        return np.array_equal(self.y, 2 * self.x + 1)
