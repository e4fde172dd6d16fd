"""The end of an incarnation: it finishes what it has accepted, then its queue, hooks, weights and programs go.

Nothing is freed while a request, a hook or the device uses it, however long that takes.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from rsrv.core.errors import RsrvError, ServerStopping

if TYPE_CHECKING:
    from rsrv.serve.loading import Loader
    from rsrv.serve.registry import Prepared
    from rsrv.serve.residency.handle import ModelWeights
    from rsrv.serve.residency.manager import Residency
    from rsrv.serve.scheduler import Scheduler

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


class Retirement:
    """One incarnation that ends; its thread runs until it is gone, or could not be freed (`error`).

    Attributes:
        keep: weights that a later incarnation uses, too, and that are its to close.
        released: it was decided who closes its weights.
    """

    def __init__(self, prepared: Prepared, *, keep: ModelWeights | None, refusal: RsrvError | None) -> None:
        self.prepared = prepared
        self.keep = keep
        self.refusal = refusal
        self.aborted = False
        self.released = False
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def abort(self, error: RsrvError) -> None:
        """Do not let its requests finish: they are refused with `error`, and results of what runs are discarded."""
        with self.changed:
            self.refusal = self.refusal or error
            self.aborted = True
            self.changed.notify_all()


class Retirements:
    """Those that are under way, by the name that their model has. Thread safe.

    `on_begin` is called with name and incarnation of each whose end begins, `on_end` with name and retirement when it
    has ended, both on its own thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loader,
        *,
        on_begin: Callable[[str, int], None],
        on_end: Callable[[str, Retirement], None],
        stopping: threading.Event,
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._loader = loader
        self._on_begin = on_begin
        self._on_end = on_end
        self._stopping = stopping
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._open: defaultdict[str, dict[Retirement, threading.Thread]] = defaultdict(dict)

    def begin(
        self,
        name: str,
        prepared: Prepared,
        *,
        keep: ModelWeights | None = None,
        refusal: RsrvError | None = None,
    ) -> Retirement:
        """Retire an incarnation; nobody enters it from now on.

        `keep`: weights that another incarnation uses, too. `refusal`: what its queued requests are told; None = they
        run.
        """
        retirement = Retirement(prepared, keep=keep, refusal=refusal)
        prepared.accepted.close()
        self._start(name, retirement)
        return retirement

    def abort(self, name: str, error: RsrvError) -> None:
        """Do not let the requests of those of `name` finish."""
        with self._lock:
            several = [*self._open.get(name, ())]
        for retirement in several:
            retirement.abort(error)

    def again(self, name: str, retirement: Retirement) -> None:
        """Try to free once more what could not be freed."""
        retirement.error, retirement.released = None, False
        self._start(name, retirement)

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            if old in self._open:
                self._open[new].update(self._open.pop(old))

    def count(self, name: str) -> int:
        """How many incarnations of `name` are being retired."""
        with self._lock:
            return len(self._open.get(name, ()))

    def accepted(self, name: str) -> int:
        """Requests that those have."""
        with self._lock:
            return sum(len(retirement.prepared.accepted) for retirement in self._open.get(name, ()))

    def wake(self) -> None:
        """The last request of one may have left."""
        with self._lock:
            every = [retirement for some in self._open.values() for retirement in some]
        for retirement in every:
            with retirement.changed:
                retirement.changed.notify_all()

    def wait(self, name: str, require_running: Callable[[], None]) -> None:
        """Until none of `name` is under way; `require_running` is called now and then, and may raise."""
        with self._lock:
            while self._open.get(name):
                self._ended.wait(_LOOK_SECONDS)
                require_running()

    def join(self, timeout: float) -> None:
        """Wait for all threads, once the server stops; what hangs is left alone."""
        with self._lock:
            threads = [thread for some in self._open.values() for thread in some.values()]
        self.wake()
        for thread in threads:
            thread.join(timeout)

    def _start(self, name: str, retirement: Retirement) -> None:
        thread = threading.Thread(target=self._run, args=(retirement,), name=f"rsrv-retire {name}", daemon=True)
        with self._lock:
            self._open[name][retirement] = thread
            # Started before anybody can find it, and join it.
            thread.start()

    def _run(self, retirement: Retirement) -> None:
        model = retirement.prepared.model
        try:
            self._on_begin(model.name, model.incarnation)
            self._finish(retirement)
            self._release(retirement)
        except ServerStopping:
            pass
        except BaseException as error:
            retirement.error = error
            log.exception("model not released name=%s incarnation=%d", model.name, model.incarnation)
        with self._lock:
            name = next(name for name, some in self._open.items() if retirement in some)
            del self._open[name][retirement]
            if not self._open[name]:
                del self._open[name]
            self._ended.notify_all()
        self._on_end(name, retirement)

    def _finish(self, retirement: Retirement) -> None:
        """Until nothing uses it."""
        accepted, model = retirement.prepared.accepted, retirement.prepared.model
        aborted = False
        if retirement.refusal is not None:
            # Those that wait need not; what runs goes on.
            self._scheduler.retire(model, error=retirement.refusal, timeout=0)
        while True:
            with retirement.changed:
                if len(accepted) and (aborted or not retirement.aborted) and not self._stopping.is_set():
                    retirement.changed.wait(_LOOK_SECONDS)
            if self._stopping.is_set():
                # The server's own stop lets requests finish, and frees everything.
                raise ServerStopping("the server is stopping")
            if retirement.aborted and not aborted:
                aborted = True
                assert retirement.refusal is not None
                for request in accepted.requests():
                    request.fail(retirement.refusal)
                self._scheduler.abort(model, retirement.refusal)
            if not len(accepted):
                break
        self._scheduler.retire(model, error=retirement.refusal)

    def _release(self, retirement: Retirement) -> None:
        prepared = retirement.prepared
        self._loader.hooks.drop(prepared.model.incarnation)
        weights = cast("ModelWeights", prepared.model.weights)
        if self._is_last(retirement, weights):
            self._residency.close_model(weights)

    def _is_last(self, retirement: Retirement, weights: ModelWeights) -> bool:
        """Whether nobody else uses the weights. An earlier incarnation with the same ones may be there still, which
        kept them for this one: now it is the one to close them."""
        with self._lock:
            retirement.released = True
            if retirement.keep is weights:
                return False
            for other in (other for some in self._open.values() for other in some):
                if other.prepared.model.weights is weights and not other.released:
                    other.keep = None
                    return False
            return True
