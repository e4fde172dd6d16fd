"""The sentences of a file that are nearest to a query, by their embeddings.

python examples/embeddings/nearest.py "somebody has a meal" --sentences examples/embeddings/sentences.txt
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from wordpieces import encode

from rsrv.client import KServeModel
from rsrv.core.errors import RsrvError


def embed(model, sentences, rows_at_once):
    """f32[sentences,384], in their order. Sentences of about one length share a request: a long one pads them all."""
    order = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
    embeddings = np.empty((len(sentences), 384), np.float32)
    for start in range(0, len(order), rows_at_once):
        rows = order[start : start + rows_at_once]
        embeddings[rows] = model.infer(encode([sentences[at] for at in rows]))["embedding"]
    return embeddings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("query")
    parser.add_argument("--sentences", type=Path, required=True, metavar="FILE", help="one sentence per line")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="how many to print (default: 3)")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="sentences in one request (default: 32)")
    parser.add_argument("--url", default="127.0.0.1:8001", help="the server (default: 127.0.0.1:8001)")
    parser.add_argument("--model", default="minilm", help="the model's name there (default: minilm)")
    given = parser.parse_args()
    try:
        sentences = [line.strip() for line in given.sentences.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        sys.exit(f"{given.sentences}: {error.strerror}")
    if not sentences:
        sys.exit(f"{given.sentences} has no sentence")
    try:
        with KServeModel(given.url, given.model, deadline=60) as model:
            query, *others = embed(model, [given.query, *sentences], given.rows)
    except RsrvError as error:
        sys.exit(f"{given.model} at {given.url}: {error.message}")
    scores = np.stack(others) @ query  # all have length 1, so this is the cosine
    for at in np.argsort(-scores, kind="stable")[: given.top]:
        print(f"{scores[at]:6.3f}  {sentences[at]}")


if __name__ == "__main__":
    main()
