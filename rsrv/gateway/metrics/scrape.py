"""Fetches the metrics of the workers for one scrape of the gateway: all at once, within one time limit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from rsrv.gateway.metrics.merge import Parsed, read

if TYPE_CHECKING:
    from rsrv.gateway.workers.worker import Worker

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
MAX_PROBLEM = 200
"""Characters of what is wrong with an endpoint, in the log: aiohttp quotes what it received."""
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class _Failure:
    """When an endpoint is asked again, and how its worker was when it failed, or was seen since."""

    until: float
    ready: bool
    incarnation: str

    def over(self, worker: Worker, now: float) -> bool:
        return now >= self.until or (worker.ready and not (self.ready and worker.incarnation == self.incarnation))

    def seen(self, worker: Worker) -> _Failure:
        return replace(self, ready=self.ready and worker.ready)


class _NoMetrics(Exception):
    """An endpoint answers something else."""


class WorkerScrape:
    """Asks every worker that has a metrics endpoint. Thread safe; who comes while it asks gets the same answers.

    An endpoint that failed is left alone for a while, unless its worker has become ready, or started anew, since. There
    is no second try.

    Args:
        members: gives the workers of now.
        total_seconds: for all of them together; who has not answered by then has failed.
        retry_after_seconds: how long one that failed is not asked.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Worker]],
        *,
        total_seconds: float = 4.0,
        retry_after_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._total_seconds = total_seconds
        self._retry_after_seconds = retry_after_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._running: Future[Mapping[str, Parsed]] | None = None
        self._failed: dict[str, _Failure] = {}
        self._up: dict[str, bool] = {}

    @property
    def up(self) -> Mapping[str, bool]:
        """Address of a worker that has a metrics endpoint → whether it gave metrics the last time; {} before that."""
        return self._up

    def fetch(self) -> Mapping[str, Parsed]:
        """Address of a worker → its metrics, of those that gave some. Takes up to `total_seconds`; never raises."""
        with self._lock:
            running, ours = self._running, self._running is None
            if running is None:
                running = self._running = Future()
        if ours:
            try:
                running.set_result(self._fetched())
            except Exception as error:
                log.exception("the workers' metrics could not be fetched")
                running.set_exception(error)
            finally:
                with self._lock:
                    self._running = None
        return {} if running.exception() is not None else running.result()

    def _fetched(self) -> dict[str, Parsed]:
        asked = [worker for worker in self._members() if worker.metrics is not None]
        now = self._clock()
        rests = self._failed
        wanted = [worker for worker in asked if worker.url not in rests or rests[worker.url].over(worker, now)]
        answers = _run(self._ask_all(wanted)) if wanted else []
        found: dict[str, Parsed] = {}
        failed = {worker.url: rests[worker.url].seen(worker) for worker in asked if worker not in wanted}
        for worker, answer in zip(wanted, answers, strict=True):
            text = read(answer, worker.name) if isinstance(answer, bytes) else None
            if text is not None and not text.empty:
                found[worker.url] = text
                self._tell(worker, "" if not text.dropped else f"{text.dropped} lines are no metrics", up=True)
                continue
            until = self._clock() + self._retry_after_seconds
            failed[worker.url] = _Failure(until, worker.ready, worker.incarnation)
            self._tell(worker, answer if isinstance(answer, str) else "its answer holds no metrics", up=False)
        self._failed = failed
        self._up = {worker.url: worker.url in found for worker in asked}
        return found

    def _tell(self, worker: Worker, problem: str, *, up: bool) -> None:
        """Log what has changed; a worker that joins and answers is no news."""
        if self._up.get(worker.url, True) == up and (up or worker.url in self._failed):
            if problem:
                log.debug("metrics worker=%s problem=%s", worker.name, problem)
            return
        if up:
            log.info("metrics worker=%s endpoint=%s up=true", worker.name, worker.metrics)
        else:
            log.warning("metrics worker=%s endpoint=%s up=false error=%s", worker.name, worker.metrics, problem)

    async def _ask_all(self, workers: Sequence[Worker]) -> list[bytes | str]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=_HEADERS,
            auto_decompress=False,
        ) as session:
            return await asyncio.gather(*(self._ask(session, worker.metrics or "") for worker in workers))

    async def _ask(self, session: aiohttp.ClientSession, endpoint: str) -> bytes | str:
        """The body, or what is wrong with the endpoint."""
        try:
            async with asyncio.timeout(self._total_seconds):
                return await _body(session, f"http://{endpoint}/metrics")
        except TimeoutError:
            return f"no answer within {self._total_seconds:g} s"
        except (aiohttp.ClientError, _NoMetrics, OSError, ValueError) as error:
            return " ".join(str(error).split())[:MAX_PROBLEM] or type(error).__name__


async def _body(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise _NoMetrics(f"status {answer.status}; wanted 200")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _NoMetrics(f"content encoding {answer.headers['Content-Encoding']!r}, which was not asked for")
        parts, size = [], 0
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _NoMetrics(f"more than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)


def _run(work: Coroutine[Any, Any, list[bytes | str]]) -> list[bytes | str]:
    """Like ``asyncio.run``, which would wait at its end for a name that is still being looked up."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_alone(work))
    finally:
        loop.close()


async def _alone(work: Coroutine[Any, Any, list[bytes | str]]) -> list[bytes | str]:
    """Do the work, and leave no task behind that it has begun."""
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
