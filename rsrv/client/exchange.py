"""One request to one model: its bytes, sent as often as the policy allows, and again when the server forgot a region.

Not for where tensors lie (`rsrv.client.shared`, `rsrv.client.dataset`): what is sent here is already placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rsrv.client.budget import Budget
from rsrv.client.failures import answered_by_server
from rsrv.client.retry import RetryBudget, RetryPolicy, with_retries
from rsrv.client.shared import Entry
from rsrv.client.steps import Aside, Call, Steps
from rsrv.client.transport.endpoint import Endpoint
from rsrv.client.transport.recovery import with_recovery
from rsrv.core.errors import RsrvError
from rsrv.core.shm.owned import OwnedRegion
from rsrv.core.wire.encode import encode_request, join
from rsrv.core.wire.headers import RequestedOutput
from rsrv.core.wire.parameters import deadline_params
from rsrv.core.wire.response import ResponseMessage, decode_response

T = TypeVar("T")


class Attempts:
    """How many of the times that a request was sent the server may still be at work on.

    Pass one to `Exchange.send`. Whatever became of the request, memory that it named must not serve another one unless
    `settled`: a timeout, a lost connection or a cancelled call says nothing about a server that is late.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = 0

    @property
    def settled(self) -> bool:
        """Whether the server has finished with all attempts."""
        return not self.open


class Exchange:
    """Requests to the model `model_name` at `endpoint`; all of them share one retry budget. Thread safe."""

    def __init__(self, model_name: str, endpoint: Endpoint, policy: RetryPolicy) -> None:
        self._model_name = model_name
        self._endpoint = endpoint
        self._policy = policy
        self._tokens = RetryBudget(policy)

    def prepare(self, work: Callable[[], T], budget: Budget) -> Steps[T]:
        """What `work` returns, which asks the server for something before a request: done again as the policy says."""

        def attempt() -> Steps[T]:
            found: T = yield Aside(work)
            return found

        return with_retries(self._policy, self._tokens, budget, attempt)

    def send(
        self,
        entries: Sequence[Entry],
        outputs: Sequence[str | RequestedOutput],
        request_id: str,
        budget: Budget,
        region: OwnedRegion | None = None,
        attempts: Attempts | None = None,
    ) -> Steps[ResponseMessage]:
        """Send `entries` and ask for `outputs` (none = all); `region` is the one in which tensors of them lie.

        `attempts` is kept up to date, also when this raises, or when its generator is closed half-way.
        All attempts together take no longer than `budget`. Raises the `RsrvError` that the server answered with, and
        ShmUnrecoverable when it does not keep `region`.
        """

        counted = Attempts() if attempts is None else attempts

        def attempt() -> Steps[ResponseMessage]:
            left = budget.remaining()
            # Twice, as the call's timeout and in the body: a proxy may replace the first.
            parameters = {} if left is None else deadline_params(int(left * 1e9))
            body = encode_request(self._model_name, entries, outputs=outputs, id=request_id, parameters=parameters)
            counted.open += 1
            try:
                answer = yield Call(self._endpoint.connection, "ModelInfer", join(body), left)
            except RsrvError as error:
                counted.open -= answered_by_server(error)
                raise
            counted.open -= 1
            message = decode_response(answer)
            return message if region is None else message.with_places(outputs)

        def send() -> Steps[ResponseMessage]:
            return with_retries(self._policy, self._tokens, budget, attempt)

        if region is None:
            return send()
        return with_recovery(self._endpoint, region, budget, send, lambda: counted.open)
