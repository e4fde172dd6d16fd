"""Models that are replaced while they serve: what the others feel of it, how soon the new version answers, how long a
change of programs stops a model, and what many loads leave behind."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np

from benchmarks import models
from benchmarks.catalogue import MIB
from benchmarks.load import INFER, ModelResult, open_channel
from benchmarks.replay import CacheCounters, at_rest, memory
from benchmarks.report import Bound, Measurement
from benchmarks.residency import budget_environ
from benchmarks.servers import Server, rsrv_server
from benchmarks.serving import idle_burner
from benchmarks.versions import COLUMNS, Answers, Version, put, traffic
from rsrv.bundle.files import HOOKS, WEIGHTS
from rsrv.client import Admin
from rsrv.core.wire import decode_response, encode_request, join
from rsrv.protos import inference as pb

SETTLE_SECONDS = 0.2
SECONDS = 120.0
"""How long anything may take at most."""
_PAUSE_SECONDS = 0.002
"""Between two requests of a client, so that there is load, and time for others."""
_SERVICE = "/inference.GRPCInferenceService/"
CHANGES = ("weights", "program", "hooks", "rename")


def _environ(tmp: Path, **more: str) -> dict[str, str]:
    """Of a server on the CPU that watches its directory, and counts the loads of weights, of which all fit."""
    return budget_environ(
        1024 * MIB,
        RSRV_WORKER_MODEL_SETTLE_SECONDS=str(SETTLE_SECONDS),
        RSRV_WORKER_CACHE_DIR=str(tmp / "cache"),
        RSRV_WORKER_ADMIN_ALLOW_EXTERNAL_DIRS="true",
        **more,
    )


# --- reloads under load ---------------------------------------------------------------------------------------------


def reload(*, short: bool) -> Iterator[Measurement]:
    """A is reloaded again and again under load: weights, program, hooks and name in turns. B has nothing to do with it.

    B's latency counts beside A's load alone, with a burner as well, and while A is reloaded, in turns.
    """
    rounds, reloads, seconds = (1, 4, 0.5) if short else (10, 20, 10.0)
    version, other = Version(), Version(7, 7, 7)
    a, b = Answers(["a", "renamed"]), Answers(["b"])
    a.allow(version)
    b.allow(other)
    latencies = {name: ModelResult("b") for name in ("quiet", "burner", "reloads")}
    took: defaultdict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        tmp = Path(folder)
        version.write(tmp / "repo" / "a")
        other.write(tmp / "repo" / "b")
        name = "a"
        with rsrv_server(tmp / "repo", environ=_environ(tmp), core=None) as server:
            for round_ in range(rounds):
                # Made in time: making them takes a while, in the process that measures.
                made: list[tuple[str, Version, Path]] = []
                for number in range(reloads):
                    change = CHANGES[number % len(CHANGES)]
                    if change != "rename":
                        version = version.next(change)  # type: ignore[arg-type]
                        version.write(path := tmp / f"made{round_}" / str(number) / "a")
                    made.append((change, version, path))
                with traffic(server.target, [a, b], clients=1, pause=_PAUSE_SECONDS):
                    time.sleep(0.5)
                    with _added(latencies["quiet"], b):
                        time.sleep(seconds)
                    with idle_burner(), _added(latencies["burner"], b):
                        time.sleep(seconds)
                    with _added(latencies["reloads"], b):
                        for change, wanted, path in made:
                            name, late = _reload(server, a, tmp / "repo", name, change, wanted, path)
                            took[change].append(late)
            compiled = _programs(server)["compiled"]
    lost = [*a.problems, *b.problems]
    if lost:
        raise RuntimeError(f"{len(lost)} requests were lost, or answered wrongly: {lost[:3]}")
    yield Measurement(
        f"{rounds * reloads} reloads under load: requests lost, failed, or answered by a mix of versions",
        len(lost),
        Bound("≤", 0),
        {"of_a": len(a.answers), "of_b": len(b.answers), "compiled": compiled},
    )
    yield from _felt(**latencies)
    for change, seconds_each in took.items():
        yield Measurement(
            f"{change}: ms from the last byte written to the first answer, without settling and compilation",
            1e3 * statistics.median(seconds_each),
            Bound("≤", 100.0),
            {"slowest_ms": 1e3 * max(seconds_each), "reloads": len(seconds_each)},
        )


class _added:
    """Adds the latencies of a model while the block runs."""

    def __init__(self, result: ModelResult, answers: Answers) -> None:
        self._result = result
        self._answers = answers

    def __enter__(self) -> None:
        self._before = len(self._answers.answers)

    def __exit__(self, *_: object) -> None:
        new = [answer.seconds for answer in self._answers.answers[self._before :]]
        self._result.latencies += new
        self._result.requests += len(new)


def _reload(
    server: Server, a: Answers, repo: Path, name: str, change: str, version: Version, made: Path
) -> tuple[str, float]:
    """Change A, and wait until it answers so. Returns its name, and the seconds that it took without settling and
    compiling."""
    before = _programs(server)["compile_seconds"]
    if change == "rename":
        new = "renamed" if name == "a" else "a"
        began = time.perf_counter()
        (repo / name).rename(repo / new)
        name, first = new, a.first_as(new, SECONDS)
    else:
        number = a.allow(version)
        began = put(repo / name, made)
        first = a.first(number, SECONDS)
    compiled = _programs(server)["compile_seconds"] - before
    return name, first.ended - began - SETTLE_SECONDS - compiled


def _felt(*, quiet: ModelResult, burner: ModelResult, reloads: ModelResult) -> Iterator[Measurement]:
    parts = {"quiet": quiet, "burner": burner, "reloads": reloads}
    for q, against, what, limit in ((0.5, quiet, "without reloads", 1.1), (0.99, burner, "beside a burner", 2.0)):
        yield Measurement(
            f"p{round(100 * q)} of a model while another one is reloaded ÷ {what}",
            reloads.quantile(q) / against.quantile(q),
            Bound("≤", limit),
            {f"{name}_ms": result.quantile(q) for name, result in parts.items()} | {"requests": reloads.requests},
        )


def _programs(server: Server) -> dict[str, Any]:
    with Admin(server.target) as admin:
        found: dict[str, Any] = admin.status()["server"]["programs"]
        return found


# --- program sets ---------------------------------------------------------------------------------------------------


def select_programs(*, short: bool) -> Iterator[Measurement]:
    """Two program sets of one model, selected in turns under load; then the outputs of the first one once more."""
    rounds = 4 if short else 100
    a = Answers(["a"])
    first, second = Version(), Version().next("program")
    a.allow(first)
    gaps: list[float] = []
    usual: list[float] = []
    calls: list[float] = []
    with TemporaryDirectory() as folder:
        tmp = Path(folder)
        first.write(tmp / "repo" / "a")
        second.write(tmp / "second" / "a")
        models.rows(tmp / "repo", steps=100, batch_sizes=(1, 4))
        models.rows(tmp / "second", steps=101, batch_sizes=(1, 4))
        environ = _environ(tmp)
        with rsrv_server(tmp / "repo", environ=environ, core=None) as server, Admin(server.target) as admin:
            for name in ("a", "rows"):
                staged = admin.stage(name, str(tmp / "second" / name))
                if staged.phase != "ready":
                    raise RuntimeError(f"program set {staged.id} of {name} is {staged.phase}: {staged.diagnostics}")
            with traffic(server.target, [a]):
                a.more(SECONDS)
            _outputs(server, "rows")
            loads = at_rest(server).loads
            with traffic(server.target, [a]):
                time.sleep(1.0)
                for number in range(rounds):
                    selected, wanted = (2, second) if number % 2 == 0 else (1, first)
                    allowed = a.allow(wanted)
                    began = time.perf_counter()
                    admin.select("a", selected, expected=3 - selected)
                    calls.append(time.perf_counter() - began)
                    ended = a.first(allowed, SECONDS).ended
                    time.sleep(0.1)
                    gaps.append(_longest_gap(a, began, ended))
                    usual.append(_longest_gap(a, ended + 0.02, ended + 0.02 + (ended - began)))
            before = _outputs(server, "rows")
            admin.select("rows", 2, expected=1)
            meanwhile = _outputs(server, "rows")
            admin.select("rows", 1, expected=2)
            after = _outputs(server, "rows")
            loaded = CacheCounters.of(server).loads - loads
    if a.problems:
        raise RuntimeError(f"{len(a.problems)} requests failed, or were answered wrongly: {a.problems[:3]}")
    yield Measurement(
        f"{rounds} selections of a program set under load: ms without an answer, beyond the usual",
        1e3 * (statistics.median(gaps) - statistics.median(usual)),
        Bound("≤", 5.0),
        {
            "gap_ms": 1e3 * statistics.median(gaps),
            "usual_ms": 1e3 * statistics.median(usual),
            "longest_ms": 1e3 * max(gaps),
            "longest_usual_ms": 1e3 * max(usual),
            "call_ms": 1e3 * statistics.median(calls),
        },
    )
    yield Measurement(f"{rounds + 2} selections: loads of weights", loaded, Bound("≤", 0))
    yield Measurement(
        "select and roll back: outputs with other bits than before",
        sum(one != other for one, other in zip(before, after, strict=True)),
        Bound("≤", 0),
        {"outputs": len(before), "others_meanwhile": sum(x != y for x, y in zip(before, meanwhile, strict=True))},
    )


def _longest_gap(answers: Answers, began: float, ended: float) -> float:
    """The longest time without an answer, of those that overlap with these seconds."""
    times = [answer.ended for answer in answers.answers]
    return max(two - one for one, two in pairwise(times) if two >= began and one <= ended)


def _outputs(server: Server, name: str, requests: int = 20) -> list[bytes]:
    rng = np.random.default_rng(0)
    outputs = []
    with open_channel(server.target) as channel:
        call = channel.unary_unary(INFER)
        for _ in range(requests):
            x = rng.standard_normal((1, 64, 64)).astype(np.float32)
            y = decode_response(call(join(encode_request(name, [("x", x)])), timeout=SECONDS)).array("y")
            outputs.append(b"" if y is None else y.tobytes())
    return outputs


# --- what loads leave behind ----------------------------------------------------------------------------------------


def load_unload(*, short: bool) -> Iterator[Measurement]:
    """A model is loaded, called and unloaded again and again; then three broken ones are loaded, again and again."""
    rounds, settle = (6, 3) if short else (300, 50)
    nbytes = (2 if short else 16) * MIB
    versions = [Version(weights=number + 1, program=number + 1) for number in range(3)]
    with TemporaryDirectory() as folder:
        tmp = Path(folder)
        Version().write(tmp / "repo" / "steady")
        for number, version in enumerate(versions):
            version.write(tmp / "repo" / f"model{number}", nbytes=nbytes)
        _write_broken(tmp / "repo", nbytes)
        # The watcher leaves the others to us.
        environ = _environ(tmp, RSRV_WORKER_MODELS_INCLUDE="steady")
        with rsrv_server(tmp / "repo", environ=environ, core=None) as server, open_channel(server.target) as channel:
            _require_answer(channel, "steady", Version())  # so that there are weights on the device all the time
            yield from _rounds(
                server, rounds, settle, "load, call and unload", lambda number: _use(channel, number, versions)
            )
            yield from _rounds(server, rounds, settle, "failing loads", lambda number: _fail(channel, number))


def _rounds(server: Server, rounds: int, settle: int, what: str, one: Callable[[int], None]) -> Iterator[Measurement]:
    rss: list[int] = []
    device: list[int] = []
    began = time.perf_counter()
    for number in range(rounds):
        one(number)
        rss.append(memory(server.pid))
        with Admin(server.target) as admin:
            device.append(admin.status()["devices"][0]["weights_bytes"])
    seconds = time.perf_counter() - began
    settled = rss[settle:]
    usual = statistics.median(settled[: max(1, settle // 3)])
    yield Measurement(
        f"{rounds} rounds of {what}: largest change of resident memory",
        max(abs(each - usual) for each in settled) / usual,
        Bound("≤", 0.05),
        {
            "first_mib": settled[0] / MIB,
            "last_mib": settled[-1] / MIB,
            "largest_mib": max(settled) / MIB,
            "round_ms": 1e3 * seconds / rounds,
        },
    )
    yield Measurement(
        f"{rounds} rounds of {what}: largest change of the weights on the device (bytes)",
        max(device) - min(device),
        Bound("≤", 0),
        {"bytes": device[-1]},
    )


BROKEN = ("truncated", "raising", "misfitting")


def _write_broken(repo: Path, nbytes: int) -> None:
    """Models that fail in different steps: weights that end too soon, hooks that raise, weights of another shape."""
    for name in BROKEN:
        Version().write(repo / name, nbytes=nbytes)
    weights = repo / "truncated" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: nbytes // 2])
    with (repo / "raising" / HOOKS).open("a") as hooks:
        hooks.write("\nraise ValueError('broken')\n")
    with TemporaryDirectory() as folder:
        other = Version().write(Path(folder) / "other", nbytes=nbytes // 2)
        (repo / "misfitting" / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())


def _use(channel: grpc.Channel, number: int, versions: Sequence[Version]) -> None:
    which = number % len(versions)
    name = f"model{which}"
    _call(channel, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name))
    _require_answer(channel, name, versions[which])
    _call(channel, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name))


def _require_answer(channel: grpc.Channel, name: str, version: Version) -> None:
    x = np.arange(COLUMNS, dtype=np.int64)[None]
    answer = channel.unary_unary(INFER)(join(encode_request(name, [("x", x)])), timeout=SECONDS)
    y = decode_response(answer).array("y")
    if y is None or not np.array_equal(y, x + version.stamp):
        raise RuntimeError(f"{name} answered {y}")


def _fail(channel: grpc.Channel, number: int) -> None:
    name = BROKEN[number % len(BROKEN)]
    with suppress(grpc.RpcError):
        _call(channel, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name))
        raise RuntimeError(f"{name} was loaded, although it is broken")


def _call(channel: grpc.Channel, method: str, message: Any) -> None:
    channel.unary_unary(_SERVICE + method)(message.SerializeToString(), timeout=SECONDS)


CASES: dict[str, Callable[..., Iterator[Measurement]]] = {
    "reload": reload,
    "select-programs": select_programs,
    "load-unload": load_unload,
}
