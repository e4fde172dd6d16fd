"""Loaded by mlserver: the models that test_contract_mlserver.py calls. Nothing of rsrv is imported here."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Affine(MLModel):
    """``y = 2 * x + 1`` in the dtype of ``x``, and ``rows``, how many rows the request had, for each of them."""

    async def load(self):
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        y = (2 * x + 1).astype(x.dtype)
        rows = (0 * x[:, :1] + len(x)).astype("int32")
        wanted = [output.name for output in payload.outputs or []]
        outputs = {"y": y, "rows": rows}
        return InferenceResponse(
            model_name=self.name,
            id=payload.id,
            outputs=[NumpyCodec.encode_output(name, outputs[name]) for name in wanted or outputs],
        )
