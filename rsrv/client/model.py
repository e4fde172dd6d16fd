"""`KServeModel`: one model behind a URL, called with arrays."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat, overload

import grpc
import numpy as np

from rsrv.client.budget import SETUP_SECONDS, Budget
from rsrv.client.channels import ChannelOptions
from rsrv.client.connection import Metadata, checked_metadata
from rsrv.client.exchange import Attempts, Exchange
from rsrv.client.facts import ModelFacts
from rsrv.client.retry import RetryPolicy
from rsrv.client.server import ModelMetadata
from rsrv.client.shared import INLINE, MODES, SHARED, Layout, Mode, worthwhile
from rsrv.client.steps import Steps, run
from rsrv.client.tensors import InferInput, InferResponse, named_arrays, output_names, require_text
from rsrv.client.transport import endpoints
from rsrv.client.transport.endpoint import Endpoint
from rsrv.client.url import host_port
from rsrv.client.windows import OutOfSharedMemory, Window, WindowPool
from rsrv.core.errors import InvalidRequest, ShmUnrecoverable, UsageError
from rsrv.core.wire.headers import RequestedOutput

if TYPE_CHECKING:
    from rsrv.client.dataset.driver import Progress
    from rsrv.client.dataset.survey import Batch

log = logging.getLogger(__name__)


def whole_or_auto(option: str, value: Any) -> int | Literal["auto"]:
    """A number of rows as an `int`, NumPy's integers too. Raises UsageError, naming the `option`."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{option}={value!r} is neither 'auto' nor a whole number from 1 on")
    return number


class KServeModel:
    """A model on a server, by URL and name. Thread safe; use it as a context manager or `close` it.

    Args:
        url: ``[grpc|http|grpcs|https://]host:port`` or ``unix:path``; ``grpcs`` and ``https`` mean TLS.
        model_name: the model's name on the server.
        max_batch_size: most rows in one request of a dataset; ``"auto"`` asks the server.
        shared_memory: ``"auto"`` sends tensors through shared memory when the server sees ours, ``"on"`` insists,
            ``"off"`` always sends them inline.
        deadline: seconds that one request may take with everything it needs; 0 or less for no limit.
        retry: when and how often a request that a busy server refused is sent again; None for `RetryPolicy()`.
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
        max_batch_size: int | Literal["auto"] = 1,
        shared_memory: Mode = "auto",
        deadline: float = 10.0,
        retry: RetryPolicy | None = None,
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
        if not isinstance(model_name, str) or not model_name:
            raise UsageError(f"model_name={model_name!r} is not the name of a model")
        if deadline is not None and (not isinstance(deadline, SupportsFloat) or isnan(deadline)):
            raise UsageError(f"deadline={deadline!r} is not a number of seconds", hint="0 for no limit")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise UsageError(f"retry={retry!r} is no RetryPolicy", hint=f"RetryPolicy(enabled={bool(retry)})")
        self._options = ChannelOptions.build(
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
        self.mode: Mode = shared_memory
        self.retry = RetryPolicy() if retry is None else retry
        self._max_batch_size = whole_or_auto("max_batch_size", max_batch_size)
        self._metadata = checked_metadata(metadata)
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False
        self._attach()

    def _attach(self) -> None:
        """What belongs to one process: its endpoint, its windows, its retry budget."""
        self._pid = os.getpid()
        self._endpoint = endpoints.acquire(self._options, self._metadata, self._channel)
        self._exchange = Exchange(self.model_name, self._endpoint, self.retry)
        self._facts = ModelFacts(self._endpoint.connection, self.model_name)
        self._windows = WindowPool(self._endpoint)
        self._went: str | None = None

    @classmethod
    def at(cls, host: str, port: int, model_name: str, **options: Any) -> Self:
        """The model at `host` and `port`; the options are those of the constructor."""
        return cls(host_port(host, port), model_name, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up the shared memory of this handle; the last one that reaches a server also hangs up. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pid == os.getpid():
            self._windows.close()
            endpoints.release(self._endpoint)

    @property
    def endpoint(self) -> Endpoint:
        """The server, as this process knows it. A forked child knows nothing yet."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._attach()
        if self._closed:
            raise UsageError(f"this handle to {self._options.target} is closed")
        return self._endpoint

    @property
    def exchange(self) -> Exchange:
        """What sends requests to this model."""
        _ = self.endpoint
        return self._exchange

    @property
    def facts(self) -> ModelFacts:
        """What is remembered of the server's answers about this model."""
        _ = self.endpoint
        return self._facts

    def metadata(self) -> ModelMetadata:
        """The model's inputs and outputs; raises UnknownModel when the server does not know it."""
        return self.facts.ask(Budget(self.deadline).at_most(SETUP_SECONDS))

    def batch_limit(self, budget: Budget, wanted: int | Literal["auto"] | None = None) -> int:
        """The most rows for one request: `wanted`, by default `max_batch_size`; for ``"auto"`` what the server says,
        which is remembered.

        A server that cannot say, or a model whose requests have no rows, gives 1.
        """
        limit = self._max_batch_size if wanted is None else wanted
        return max(1, self.facts.most_rows(budget)) if limit == "auto" else limit

    @property
    def transport(self) -> str | None:
        """How the tensors of the latest answer to `infer` travelled: ``"shared memory"`` or ``"inline"``; None before
        the first one, unless the mode decides it."""
        return INLINE if self.mode == "off" else self._went

    def infer(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        *,
        id: str = "",  # noqa: A002
    ) -> dict[str, np.ndarray]:
        """Send `inputs` (name → array, row-major, batch axis first where the model has one) and return its outputs.

        `outputs` names the wanted ones and their order; None means all. The arrays are read-only and stay valid and
        unchanged for as long as they are kept. The request is sent again as `retry` says, within `deadline`. Raises the
        `RsrvError` that the server answered with, `ServerUnreachable` without an answer, TypeError for a dtype the wire
        has no form for, UsageError for a masked array.
        """
        tensors = named_arrays(inputs)
        return run(self.tensor_steps(tensors, outputs, id)).arrays()

    def __call__(self, data: Any, outputs: Sequence[str] | None = None) -> Any:
        """Send all the rows of `data` in one request: an array for the only input, or a mapping of arrays by name.

        Returns what `map` returns, read-only, and raises what `infer` raises.
        """
        from rsrv.client.dataset.rows import call_steps

        return run(call_steps(self, data, outputs))

    @overload
    def map(
        self,
        data: np.ndarray | Mapping[str, Any],
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Any: ...
    @overload
    def map(
        self,
        data: Iterable[Any],
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Iterator[Any]: ...
    def map(
        self,
        data: Any,
        *,
        batch: Batch = None,
        progress: Progress | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Any:
        """The outputs for many rows, or for many items, in order, with several requests in flight.

        Arrays with N rows (one for the only input, or a mapping by name; memory-mapped ones are read as they are
        needed) give outputs with N rows: an array when there is one output and one array was given, else a mapping.

        Any other iterable is one of items, each an array or a mapping without the row axis, all alike. It gives an
        iterator of the outputs of each, in that form. Items are read a few requests ahead, as `iter` goes on, and
        never all at once; an error comes when its turn has come, after the outputs of all items before.

        Args:
            batch: the most rows in a request, ``"auto"`` for what the server says; by default `max_batch_size`.
            progress: called after each request with (items done, items), -1 for a number that is not known.
            outputs: the wanted ones; by default all. Each needs a row for each item.

        Raises, beside what `infer` raises, UsageError and InvalidRequest for data that is not what the model takes,
        and InvalidResponse for answers without a row for each item; notes name the items.
        """
        from rsrv.client.dataset import rows

        if rows.is_rows(data):
            return rows.over_rows(self, data, batch, progress, outputs)
        from rsrv.client.dataset.stream import over_items

        return over_items(self, data, batch, progress, outputs)

    def request(
        self,
        inputs: Sequence[InferInput],
        outputs: Sequence[str] | None = None,
        id: str = "",  # noqa: A002
        *,
        inline: bool = False,
    ) -> InferResponse:
        """Like `infer`, with explicit tensors and the whole response; `inline` leaves shared memory out of it."""
        tensors = [(tensor.name, tensor.data) for tensor in inputs]
        return run(self.tensor_steps(tensors, outputs, id, inline=inline))

    def tensor_steps(
        self,
        tensors: Sequence[tuple[str, np.ndarray]],
        outputs: Sequence[str] | None = None,
        id: str = "",  # noqa: A002
        *,
        inline: bool = False,
    ) -> Steps[InferResponse]:
        """`request`, as steps, for arrays that `wire_array` has seen."""
        endpoint = self.endpoint
        budget = Budget(self.deadline)
        if isinstance(outputs, str):
            outputs = (outputs,)
        require_text("id", id)
        for name, _ in tensors:
            require_text("the name of an input", name)
        outputs = None if outputs is None else output_names(outputs)
        layout = None if inline else (yield from self._layout(tensors, outputs, budget))
        if layout is not None:
            try:
                response = yield from self._through_shared_memory(layout, tensors, outputs, id, budget)
                self._went = SHARED
                return response
            except OutOfSharedMemory as error:
                if self.mode == "on":
                    raise
                log.warning("model=%s event=shm_full using=inline %s", self.model_name, error)
            except ShmUnrecoverable as error:
                if self.mode == "on":
                    raise
                endpoint.latch(error)
        message = yield from self._exchange.send(tensors, outputs or (), id, budget)
        self._went = INLINE
        return InferResponse(message)

    def _layout(
        self, tensors: Sequence[tuple[str, np.ndarray]], outputs: Sequence[str] | None, budget: Budget
    ) -> Steps[Layout | None]:
        """Where tensors would lie in shared memory; None for a call that goes inline."""
        if self.mode == "off" or not (yield from self._shares_memory(budget)):
            return None
        facts = self._facts
        if not facts.sizes_known:
            yield from self._exchange.prepare(lambda: facts.learn_sizes(budget), budget)
        sizes = facts.output_sizes(outputs, tensors)
        return Layout.of(tensors, sizes) if self.mode == "on" or worthwhile(tensors, sizes) else None

    def _shares_memory(self, budget: Budget) -> Steps[bool]:
        """Whether to use shared memory. The first call asks the server, which takes time; later ones know."""
        endpoint = self._endpoint
        shares = endpoint.route(self.mode)
        if shares is None:
            shares = yield from self._exchange.prepare(lambda: endpoint.uses_shared_memory(self.mode, budget), budget)
        return shares

    def _acquire(self, windows: WindowPool, n_bytes: int, budget: Budget) -> Steps[Window]:
        """A window, for which the region may have to grow. One that comes too late, for a task that was cancelled
        meanwhile, goes back."""
        kept: list[Window] = []
        gone = False

        def give_back() -> None:
            with contextlib.suppress(IndexError):
                windows.release(kept.pop())

        def acquire() -> Window:
            window = windows.acquire(n_bytes, lambda: budget.at_most(SETUP_SECONDS))
            kept.append(window)
            if gone:
                give_back()
            return window

        try:
            return (yield from self._exchange.prepare(acquire, budget))
        except BaseException:
            gone = True
            give_back()
            raise

    def _through_shared_memory(
        self,
        layout: Layout,
        tensors: Sequence[tuple[str, np.ndarray]],
        outputs: Sequence[str] | None,
        request_id: str,
        budget: Budget,
    ) -> Steps[InferResponse]:
        windows = self._windows
        window = windows.take(layout.byte_size)
        if window is None:
            window = yield from self._acquire(windows, layout.byte_size, budget)
        attempts = Attempts()
        try:
            requested: Sequence[str | RequestedOutput] = layout.requested(window) or outputs or ()
            entries = layout.write(window, tensors)
            message = yield from self._exchange.send(entries, requested, request_id, budget, window.region, attempts)
            return InferResponse(message, layout.read(window, message))
        except InvalidRequest:
            self._facts.forget()
            raise
        finally:
            windows.release(window, reusable=attempts.settled)
