"""`KServeModel`: one model behind a URL, called with arrays; and `infer_sync`, the call with explicit tensors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from rsrv.client.budget import Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Connection, Metadata
from rsrv.client.failures import answered_by_server
from rsrv.client.server import ModelMetadata, model_metadata
from rsrv.client.shared import MODES, Entry, Layout, Mode, OutputSizes, Registration, use_shared_memory
from rsrv.client.tensors import InferInput, InferResponse
from rsrv.client.windows import OutOfSharedMemory, WindowPool
from rsrv.core.errors import InvalidRequest, RsrvError, UnregisteredRegion, UsageError
from rsrv.core.wire.encode import encode_request, join
from rsrv.core.wire.headers import RequestedOutput
from rsrv.core.wire.parameters import deadline_params
from rsrv.core.wire.response import ResponseMessage, decode_response

log = logging.getLogger(__name__)


class KServeModel:
    """A model on a server, by URL and name. Thread safe; use it as a context manager or `close` it.

    Args:
        url: ``[grpc|http|grpcs|https://]host:port`` or ``unix:path``; ``grpcs`` and ``https`` mean TLS.
        model_name: the model's name on the server.
        shared_memory: ``"auto"`` sends tensors through shared memory when the server sees ours, ``"on"`` insists,
            ``"off"`` always sends them inline.
        deadline: seconds that one request may take with everything it needs; 0 or less for no limit.
        secure: TLS or not, instead of what the URL's scheme says.
        root_certificates, client_key, client_cert: PEM bytes for TLS.
        metadata: gRPC metadata sent with every call.
        max_send_message_length, max_receive_message_length: bytes; by default from the environment variables
            ``RSRV_CLIENT_GRPC_MAX_SEND_MSG_BYTES`` and ``RSRV_CLIENT_GRPC_MAX_RECV_MSG_BYTES``, else 512 MiB.
        channel: a grpcio channel of the caller's to use instead of the process-wide one of this target.

    Nothing is sent before the first call.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        *,
        shared_memory: Mode = "auto",
        deadline: float = 10.0,
        secure: bool | None = None,
        root_certificates: bytes | None = None,
        client_key: bytes | None = None,
        client_cert: bytes | None = None,
        metadata: Metadata = (),
        max_send_message_length: int | None = None,
        max_receive_message_length: int | None = None,
        channel: grpc.Channel | None = None,
    ) -> None:
        if shared_memory not in MODES:
            raise UsageError(f"shared_memory={shared_memory!r} is not one of {', '.join(MODES)}")
        if not model_name:
            raise UsageError("model_name is empty")
        options = ChannelOptions.build(
            url,
            secure=secure,
            root_certificates=root_certificates,
            client_key=client_key,
            client_cert=client_cert,
            max_send_message_length=max_send_message_length,
            max_receive_message_length=max_receive_message_length,
        )
        self.model_name = model_name
        self.deadline = deadline
        self._mode: Mode = shared_memory
        self._connection = Connection(options, metadata, channel)
        self._sizes = OutputSizes(self._connection, model_name)
        self._lock = threading.Lock()
        self._use_shm: bool | None = None
        self._windows = WindowPool(Registration(self._connection))
        self._pid = os.getpid()

    @classmethod
    def at(cls, host: str, port: int, model_name: str, **options: Any) -> KServeModel:
        """The model at `host` and `port`; the options are those of the constructor."""
        address = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return cls(f"{address}:{port}", model_name, **options)

    def __enter__(self) -> KServeModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unregister and unlink the shared memory and let go of the channel. Idempotent."""
        if self._pid == os.getpid():
            self._windows.close()
        self._connection.close()

    def metadata(self) -> ModelMetadata:
        """The model's inputs and outputs; raises UnknownModel when the server does not know it."""
        return model_metadata(self._connection, self.model_name, Budget(self.deadline).remaining())

    @property
    def transport(self) -> str | None:
        """How `infer` sends tensors: ``"shared memory"``, ``"inline"``, or None before the first call decided it."""
        use = False if self._mode == "off" else self._use_shm
        return None if use is None else "shared memory" if use else "inline"

    def infer(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        *,
        id: str = "",  # noqa: A002
    ) -> dict[str, np.ndarray]:
        """Send `inputs` (name → array, row-major, batch axis first where the model has one) and return its outputs.

        `outputs` names the wanted ones and their order; None means all. The arrays are read-only and stay valid and
        unchanged for as long as they are kept. One attempt is made, within `deadline`. Raises the `RsrvError` that
        the server answered with, `ServerUnreachable` without an answer, TypeError for a dtype the wire has no form
        for.
        """
        return self.request([InferInput(name, array) for name, array in inputs.items()], outputs, id).arrays()

    def request(
        self,
        inputs: Sequence[InferInput],
        outputs: Sequence[str] | None = None,
        id: str = "",  # noqa: A002
        *,
        inline: bool = False,
    ) -> InferResponse:
        """Like `infer`, with explicit tensors and the whole response; `inline` leaves shared memory out of it."""
        budget = Budget(self.deadline)
        tensors = [(tensor.name, tensor.data) for tensor in inputs]
        if not inline and self._shares_memory(budget):
            try:
                return self._through_shared_memory(tensors, outputs, id, budget)
            except OutOfSharedMemory as error:
                if self._mode == "on":
                    raise
                log.warning("model=%s event=shm_full using=inline %s", self.model_name, error)
        message = self._send(tensors, outputs or (), id, budget)
        return InferResponse(message)

    def _shares_memory(self, budget: Budget) -> bool:
        """Whether to use shared memory; the first call asks the server, concurrent ones wait for its answer."""
        if self._use_shm is None or self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():  # a forked child: the regions are its parent's
                    self._windows = WindowPool(Registration(self._connection))
                    self._pid = os.getpid()
                if self._use_shm is None:
                    self._use_shm = use_shared_memory(self._connection, self._mode, budget)
        return self._use_shm

    def _through_shared_memory(
        self, tensors: Sequence[tuple[str, np.ndarray]], outputs: Sequence[str] | None, request_id: str, budget: Budget
    ) -> InferResponse:
        layout = Layout.of(tensors, self._sizes.of(outputs, tensors, budget))
        windows = self._windows
        window = windows.acquire(layout.byte_size, budget.remaining)
        reusable = False
        try:
            requested: Sequence[str | RequestedOutput] = layout.requested(window) or outputs or ()
            message = self._send(layout.write(window, tensors), requested, request_id, budget)
            reusable = True
            return InferResponse(message, layout.read(window, message))
        except RsrvError as error:
            # A region that the server forgot is given up too, so that the next call registers a new one.
            reusable = reusable or (answered_by_server(error) and not isinstance(error, UnregisteredRegion))
            if isinstance(error, InvalidRequest):
                self._sizes.forget()
            raise
        finally:
            windows.release(window, reusable=reusable)

    def _send(
        self, entries: Sequence[Entry], outputs: Sequence[str | RequestedOutput], request_id: str, budget: Budget
    ) -> ResponseMessage:
        left = budget.remaining()
        parameters = {} if left is None else deadline_params(int(left * 1e9))
        body = join(encode_request(self.model_name, entries, outputs=outputs, id=request_id, parameters=parameters))
        return decode_response(self._connection.call("ModelInfer", body, left))


def infer_sync(
    model: KServeModel,
    inputs: Sequence[InferInput],
    outputs: Sequence[str] | None = None,
    id: str = "",  # noqa: A002
) -> InferResponse:
    """Send one inline request to `model` and wait for the response; read it with `InferOutput`."""
    return model.request(inputs, outputs, id, inline=True)
