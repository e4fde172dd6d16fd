"""Architectures of transformers, made from a small configuration with seeded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zoo.models import Made, ZooModel
from zoo.torchvision_ops import declare
from zoo.weights import calibrate, enliven, picture

_WORDS = 1000
_LENGTH = 32

_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}


class Text(nn.Module):
    """A language model as one function of token ids and mask; returns the named field of its result."""

    def __init__(self, model: nn.Module, field: str, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._field = field
        self._fixed = dict(fixed)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(
            self.model(input_ids=input_ids, attention_mask=attention_mask, **self._fixed), self._field
        )
        return result


class Signal(nn.Module):
    """A model of pictures or sounds as a function of one tensor; returns the named fields of its result."""

    def __init__(self, model: nn.Module, argument: str, fields: tuple[str, ...], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._argument = argument
        self._fields = fields
        self._fixed = dict(fixed)

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.model(**{self._argument: values}, **self._fixed)
        return {field: getattr(result, field) for field in self._fields}


def _model(config: str, model: str, settings: Mapping[str, Any]) -> nn.Module:
    declare()
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return enliven(made).eval()


def text(
    name: str,
    config: str,
    model: str,
    *,
    field: str = "last_hidden_state",
    fixed: Mapping[str, Any] | None = None,
    **settings: Any,
) -> ZooModel:
    def make() -> Made:
        made = _model(config, model, {"vocab_size": _WORDS, **settings})
        mask = torch.ones(4, _LENGTH, dtype=torch.int64)
        mask[1:, 20:] = 0
        ids = torch.randint(3, _WORDS, (4, _LENGTH))
        return Text(made, field, fixed or {}), {"input_ids": ids, "attention_mask": mask}

    # The examples of the mask alone: random zeros would also mask out whole rows, which these models answer with NaN.
    return ZooModel(f"hf-{name}", "transformers", make, options={"input_ranges": {"attention_mask": (1, 1)}})


def signal(
    name: str,
    config: str,
    model: str,
    argument: str,
    values: Callable[[], torch.Tensor],
    fields: tuple[str, ...] = ("last_hidden_state",),
    fixed: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> ZooModel:
    def make() -> Made:
        inputs = {"values": values()}
        module = Signal(_model(config, model, settings), argument, fields, fixed or {})
        return calibrate(module, inputs.values()), inputs

    return ZooModel(f"hf-{name}", "transformers", make, **(more or {}))


def _picture(size: int = 64) -> Callable[[], torch.Tensor]:
    return lambda: picture(size)


_NO_CACHE: dict[str, Any] = {"use_cache": False}
_PICTURES: dict[str, Any] = {**_SMALL, "image_size": 64, "patch_size": 16}

MODELS = (
    text("bert", "BertConfig", "BertModel", **_SMALL),
    text("roberta", "RobertaConfig", "RobertaModel", **_SMALL),
    text("distilbert", "DistilBertConfig", "DistilBertModel", dim=256, n_layers=4, n_heads=4, hidden_dim=512),
    text("albert", "AlbertConfig", "AlbertModel", embedding_size=64, **_SMALL),
    text("electra", "ElectraConfig", "ElectraModel", embedding_size=64, **_SMALL),
    text("mpnet", "MPNetConfig", "MPNetModel", **_SMALL),
    text(
        "deberta-v2",
        "DebertaV2Config",
        "DebertaV2Model",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        **_SMALL,
    ),
    text(
        "modernbert",
        "ModernBertConfig",
        "ModernBertModel",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        **_SMALL,
    ),
    text(
        "gpt2",
        "GPT2Config",
        "GPT2Model",
        fixed=_NO_CACHE,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    text("gpt-neox", "GPTNeoXConfig", "GPTNeoXModel", fixed=_NO_CACHE, **_SMALL),
    text("llama", "LlamaConfig", "LlamaForCausalLM", field="logits", fixed=_NO_CACHE, num_key_value_heads=2, **_SMALL),
    text("qwen3", "Qwen3Config", "Qwen3Model", fixed=_NO_CACHE, num_key_value_heads=2, head_dim=64, **_SMALL),
    text("gemma2", "Gemma2Config", "Gemma2Model", fixed=_NO_CACHE, num_key_value_heads=2, head_dim=64, **_SMALL),
    text("mamba", "MambaConfig", "MambaModel", fixed=_NO_CACHE, hidden_size=128, num_hidden_layers=2),
    text("t5-encoder", "T5Config", "T5EncoderModel", d_model=256, d_kv=64, d_ff=512, num_layers=4, num_heads=4),
    signal(
        "vit", "ViTConfig", "ViTModel", "pixel_values", _picture(), ("last_hidden_state", "pooler_output"), **_PICTURES
    ),
    signal(
        "dinov2",
        "Dinov2Config",
        "Dinov2Model",
        "pixel_values",
        _picture(56),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=56,
        patch_size=14,
    ),
    signal(
        "siglip-vision",
        "SiglipVisionConfig",
        "SiglipVisionModel",
        "pixel_values",
        _picture(),
        ("last_hidden_state", "pooler_output"),
        **_PICTURES,
    ),
    signal(
        "clip-vision",
        "CLIPVisionConfig",
        "CLIPVisionModel",
        "pixel_values",
        _picture(),
        ("last_hidden_state", "pooler_output"),
        **_PICTURES,
    ),
    signal(
        "segformer",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        "pixel_values",
        _picture(128),
        ("logits",),
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 64, 128],
        decoder_hidden_size=64,
        num_labels=19,
    ),
    signal(
        "yolos",
        "YolosConfig",
        "YolosForObjectDetection",
        "pixel_values",
        _picture(),
        ("logits", "pred_boxes"),
        num_detection_tokens=20,
        **{**_PICTURES, "image_size": [64, 64]},
    ),
    signal(
        "convnextv2",
        "ConvNextV2Config",
        "ConvNextV2Model",
        "pixel_values",
        _picture(),
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 2, 1],
    ),
    signal("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model", "input_values", lambda: torch.randn(4, 8000), **_SMALL),
    signal(
        "whisper",
        "WhisperConfig",
        "WhisperForAudioClassification",
        "input_features",
        lambda: torch.randn(4, 80, 200),
        ("logits",),
        d_model=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=256,
        max_source_positions=100,
    ),
    signal(
        "audio-spectrogram",
        "ASTConfig",
        "ASTModel",
        "input_values",
        lambda: torch.randn(4, 128, 128),
        ("last_hidden_state", "pooler_output"),
        max_length=128,
        **_SMALL,
    ),
)
