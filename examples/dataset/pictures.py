"""The dataset: numbered pictures that are generated, so that what the model should say of each one is known."""

import numpy as np

SIZE = 96
NAMES = ("red", "green", "blue", "yellow", "cyan", "magenta")
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [0, 255, 255], [255, 0, 255]], np.float32)
BYTES = SIZE * SIZE * 3

_NOISE = np.random.default_rng(0).integers(-60, 61, (SIZE, SIZE, 3))
_SURFACES = np.clip(COLOURS[:, None, None, :] + _NOISE, 0, 255).astype(np.uint8)


def draw(number, picture):
    """Picture `number` into `picture`, u8[SIZE,SIZE,3]: a colour under noise, with a band of the next colour on top."""
    ground, height = number % len(NAMES), band(number)
    picture[:height] = _SURFACES[(ground + 1) % len(NAMES), :height]
    picture[height:] = _SURFACES[ground, height:]


def band(number):
    """How many of its rows have the next colour: less than half."""
    return number * 7 % (SIZE // 2)
