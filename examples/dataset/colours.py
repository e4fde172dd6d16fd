"""The colours of many pictures, by a model on a server: the same dataset through each face of the client.

python examples/dataset/colours.py --items 20000 --face io
"""

import argparse
import asyncio
import sys
import time

import numpy as np
from pictures import BYTES, NAMES, SIZE, band, draw

from rsrv.client import (
    AsyncKServeModel,
    InferenceIO,
    InferOutput,
    KServeModel,
    OutputSpec,
    infer_async,
    pool_view,
    scratch,
    validate_io,
)
from rsrv.core.errors import RsrvError


class Colours(InferenceIO):
    """Pictures drawn where the server reads them; `shares` f32[items,6] fills up as answers come."""

    def __init__(self, items):
        self.shares = np.empty((items, len(NAMES)), np.float32)

    def __len__(self):
        return len(self.shares)

    def item_input_bytes(self):
        return BYTES

    def output_specs(self):
        return [OutputSpec("share", np.float32, (len(NAMES),))]

    def encode_chunk(self, rows, slot):
        image = scratch(slot, "image", (len(rows), SIZE, SIZE, 3), np.uint8)
        for number, picture in zip(rows, pool_view(image), strict=True):
            draw(number, picture)
        return image

    def decode_chunk(self, rows, response):
        self.shares[rows.start : rows.stop] = InferOutput("share", response, np.float32)


def pictures(items):
    """One after another, as a loader or a camera would give them."""
    for number in range(items):
        picture = np.empty((SIZE, SIZE, 3), np.uint8)
        draw(number, picture)
        yield picture


def with_io(model, items, show):
    dataset = Colours(items)
    validate_io(model, dataset, items=2)  # sends nothing: is this what the model takes and gives?
    infer_async(model, dataset, progress=show)
    return dataset.shares


def with_map(model, items, show):
    shares = []
    for share in model.map(pictures(items)):  # in order, while later pictures are drawn and sent
        shares.append(share)
        show(len(shares), items)
    return np.stack(shares)


def with_array(model, items, show):
    """All at once: for what is an array already, or a memory-mapped file (``np.load(…, mmap_mode="r")``)."""
    return model.map(np.stack(list(pictures(items))), progress=show)


async def with_asyncio(url, name, options, items, show):
    shares = []
    async with AsyncKServeModel(url, name, **options) as model:
        async for share in model.map(pictures(items)):
            shares.append(share)
            show(len(shares), items)
    return np.stack(shares)


def expected(items):
    """What the shares should be, from how the pictures are drawn."""
    shares = np.zeros((items, len(NAMES)), np.float32)
    for number in range(items):
        ground = number % len(NAMES)
        shares[number, (ground + 1) % len(NAMES)] = band(number) / SIZE
        shares[number, ground] = 1 - band(number) / SIZE
    return shares


def show_progress(done, items):
    if sys.stderr.isatty():
        print(f"\r{done} of {items}", end="" if done < items else "\n", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    faces = {"io": with_io, "map": with_map, "array": with_array, "asyncio": None}
    parser.add_argument("--face", choices=faces, default="io", help="how to call the client (default: io)")
    parser.add_argument("--items", type=int, default=20000, metavar="N", help="pictures (default: 20000)")
    parser.add_argument("--shm", choices=("auto", "on", "off"), default="auto", help="shared memory (default: auto)")
    parser.add_argument("--url", default="127.0.0.1:8001", help="the server (default: 127.0.0.1:8001)")
    parser.add_argument("--model", default="colours", help="the model's name there (default: colours)")
    given = parser.parse_args()
    if given.items < 1:
        sys.exit("--items: at least 1")
    options = {"max_batch_size": "auto", "shared_memory": given.shm, "deadline": 60}
    started = time.perf_counter()
    try:
        if given.face == "asyncio":
            shares = asyncio.run(with_asyncio(given.url, given.model, options, given.items, show_progress))
        else:
            with KServeModel(given.url, given.model, **options) as model:
                shares = faces[given.face](model, given.items, show_progress)
    except RsrvError as error:
        sys.exit(f"{given.model} at {given.url}: {error.message}")
    seconds = time.perf_counter() - started
    right = np.isclose(shares, expected(given.items), atol=1e-6).all(1).sum()
    print(f"{given.items} pictures in {seconds:.1f} s, {given.items / seconds:.0f} a second; {right} as drawn")


if __name__ == "__main__":
    main()
