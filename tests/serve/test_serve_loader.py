"""What becomes of bundles: names, allowlists, duplicates, what is not supported yet, and how failures are kept."""

import shutil
import threading

import numpy as np
import pytest
from support.bundles import N, write_affine, write_model

from rsrv.core.config import BundlesConfig, EndpointsConfig, HooksConfig, RuntimeConfig, ServerConfig
from rsrv.runtime import CompilePool, open_cache, open_device
from rsrv.serve.loading import DigestWatch, Loader, LoadProgress, ProgramSource
from rsrv.serve.loading import digests as loading_digests
from rsrv.serve.loading.coherence import Versions
from rsrv.serve.registry import ModelState, Registry
from rsrv.serve.residency.manager import Residency
from rsrv.serve.residency.tensors import TensorPool
from rsrv.serve.scheduler import Scheduler


class World:
    """A loader over real parts, on the CPU; compiling is for the pool's one process."""

    def __init__(self, pool, device):
        self.pool, self.device = pool, device
        self.stopping = threading.Event()
        self.phases = []
        self.reasons = []  # of models that changed, as operators see them
        self.loaders = []

    def load(self, *dirs, cache=None, **sections):
        self.registry = Registry(lambda name: name and self.reasons.append(self.registry.get(name).reason))
        self.scheduler = Scheduler(self.device)
        self.progress = LoadProgress()
        source = ProgramSource(device=self.device, pool=self.pool, cache=cache, progress=self.progress)
        residency = Residency(self.device, self.scheduler, None, TensorPool(self.device))
        self.loaders.append((self.scheduler, residency, loader := Loader(
            config=ServerConfig(model_dirs=[str(d) for d in dirs], endpoints=EndpointsConfig(grpc_port=0), **sections),
            registry=self.registry, scheduler=self.scheduler, residency=residency, source=source,
            progress=self.progress, stopping=self.stopping, on_phase=self.phases.append)))  # fmt: skip
        loader.load_all()
        return {entry.name: entry for entry in self.registry.entries()}

    def close(self):
        for scheduler, residency, loader in self.loaders:
            scheduler.stop()
            loader.close()
            residency.free()


@pytest.fixture(scope="module")
def parts():
    with CompilePool() as pool:
        device = open_device("cpu")
        yield pool, device
        device.close()


@pytest.fixture
def world(parts):
    world = World(*parts)
    yield world
    world.close()


@pytest.fixture(scope="module")
def affine(tmp_path_factory):
    return write_affine(tmp_path_factory.mktemp("affine") / "affine", batch_sizes=(1, 4))


def copy(affine, to, hooks=None):
    shutil.copytree(affine, to)
    if hooks is not None:
        (to / "model.py").write_text(hooks)
    return to


def edit(bundle, old, new):
    text = (bundle / "manifest.yaml").read_text()
    assert old in text
    (bundle / "manifest.yaml").write_text(text.replace(old, new))


def test_a_bundle_becomes_a_model_with_its_programs_and_weights(world, affine):
    entries = world.load(affine.parent)
    assert entries["affine"].state is ModelState.READY
    model = entries["affine"].prepared.model
    assert model.batch_keys(()) == (1, 4)
    assert model.weights.nbytes == 24
    assert world.phases == ["load", "compiled 0/2", "compiled 1/2", "compiled 2/2"]
    results, got = [], threading.Event()
    world.scheduler.start()
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    world.scheduler.submit(model, {"x": x}, 2, (), 0, lambda result: (results.append(result), got.set()))
    assert got.wait(60)
    np.testing.assert_array_equal(results[0].outputs["y"], x * 2 + 1)


def test_the_first_of_two_bundles_of_one_name_wins(world, affine, tmp_path, caplog):
    other = write_affine(tmp_path / "affine", scale=5, batch_sizes=(1,))
    entries = world.load(affine.parent, other.parent)
    assert list(entries) == ["affine"]
    assert entries["affine"].path == affine
    assert f"reason=duplicate_name path={other} first={affine}" in caplog.text


def test_an_allowlist_decides_what_is_even_opened(world, affine, tmp_path, caplog):
    copy(affine, tmp_path / "a")
    copy(affine, tmp_path / "b")
    (tmp_path / "b" / "manifest.yaml").write_text("not: [a bundle")
    assert list(world.load(tmp_path, models_include=["a", "c"])) == ["a"]
    assert "names=c" in caplog.text


def test_an_empty_repository_is_a_warning(world, tmp_path, caplog):
    assert world.load(tmp_path) == {}
    assert "no model bundles found" in caplog.text
    assert world.registry.waiting_for("all") == "no model is registered"


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_an_import_of_hooks_that_never_returns_is_told_and_fails_its_model_at_the_time_limit(
    world, affine, tmp_path, mode, monkeypatch, caplog
):
    monkeypatch.setattr("rsrv.serve.loading.hookfile._LONG_SECONDS", 0.0)
    bundle = copy(affine, tmp_path / "stuck", "import time\ntime.sleep(20)\ndef preprocess(inputs): return inputs\n")
    edit(bundle, "axis_order", f"hooks: {{mode: {mode}, processes: 1}}\naxis_order")
    entry = world.load(tmp_path, hooks=HooksConfig(import_timeout_seconds=1.0))["stuck"]
    assert entry.reason == f"hooks: {bundle / 'model.py'}: importing it took longer than 1 s"
    assert any(reason.startswith("preparing: its hooks are being imported for ") for reason in world.reasons)
    assert caplog.text.count("hooks are still being imported name=stuck seconds=0 limit=1") == 1
    assert entry.importing_since is None


def test_hooks_in_processes_are_as_many_as_the_manifest_says_and_end_with_the_loader(world, affine, tmp_path):
    text = "import os\nimport numpy as np\ndef preprocess(inputs): return {'pid': np.array(os.getpid())}\n"
    bundles = [copy(affine, tmp_path / "repo" / name, text) for name in ("two", "default")]
    edit(bundles[0], "axis_order", "hooks: {mode: process, processes: 2}\naxis_order")
    edit(bundles[1], "axis_order", "hooks: {mode: process, timeout_seconds: 9}\naxis_order")
    entries = world.load(tmp_path / "repo")
    found = {}
    for name, entry in entries.items():
        prepared = entry.prepared
        found[name] = prepared.processes
        assert prepared.hooks.preprocess({})["pid"] in prepared.processes.pids
        assert prepared.hooks.postprocess is None
    assert {name: len(processes.pids) for name, processes in found.items()} == {"two": 2, "default": 1}
    assert entries["default"].prepared.hook_timeout == 9
    world.loaders[0][2].hooks.close()
    assert all(not processes.pids for processes in found.values())


def test_a_model_that_fails_after_its_hooks_were_started_leaves_no_process(world, affine, tmp_path, monkeypatch):
    bundle = copy(affine, tmp_path / "m", "def preprocess(inputs): return inputs\n")
    edit(bundle, "axis_order", "hooks: {mode: process, processes: 1}\naxis_order")
    started = []

    def no_weights(*_, **__):
        started.extend(world.loaders[0][2].hooks._processes.values())
        raise MemoryError

    monkeypatch.setattr("rsrv.serve.residency.tensors.TensorPool.load", no_weights)
    assert world.load(tmp_path)["m"].reason.startswith("weights: ")
    assert len(started) == 1
    assert not started[0].pids


def test_what_is_not_supported_yet_fails_with_these_words(world, tmp_path):
    meta = tmp_path / "meta"
    meta.mkdir()
    (meta / "manifest.yaml").write_text(
        'format_version: "3.0"\nkind: meta\nmeta: {calls: [good]}\n'
        'client_inputs: [{name: x, dtype: f32, shape: "n"}]\nclient_outputs: [{name: y, dtype: f32, shape: "n"}]\n'
    )
    (meta / "model.py").write_text("def run(inputs, call): return inputs\n")
    entries = world.load(tmp_path)
    assert {name: entry.reason for name, entry in entries.items()} == {
        "meta": "manifest: model 'meta' has kind: meta, which is not supported yet",
    }


def test_models_whose_programs_are_in_the_cache_need_not_wait_for_the_others(world, affine, tmp_path, caplog):
    cache = open_cache(tmp_path / "cache", {"device": "here"})
    copy(affine, tmp_path / "repo" / "z-known")
    world.load(tmp_path / "repo", cache=cache)
    write_affine(tmp_path / "repo" / "a-new", features=7, batch_sizes=(1,))
    caplog.set_level("INFO")
    entries = world.load(tmp_path / "repo", cache=cache)
    loaded = [record.args[0] for record in caplog.records if record.getMessage().startswith("model loaded")]
    assert loaded == ["z-known", "a-new"]
    assert {entry.state for entry in entries.values()} == {ModelState.READY}
    assert (world.progress.counts.cache, world.progress.counts.compiled) == (2, 1)
    assert world.phases[-1] == "compiled 3/3, 2 from cache"
    cache.close()


def test_hooks_are_run_once_per_load_and_only_where_they_are_allowed(world, affine, tmp_path):
    marker = tmp_path / "ran"
    text = f"with open({str(marker)!r}, 'a') as file: file.write('x')\ndef preprocess(inputs): return inputs\n"
    copy(affine, tmp_path / "repo" / "m", text)
    entry = world.load(tmp_path / "repo", hooks=HooksConfig(allow=False))["m"]
    assert entry.reason.startswith(f"hooks: {tmp_path / 'repo' / 'm' / 'model.py'}: the bundle has hooks")
    assert not marker.exists()
    entry = world.load(tmp_path / "repo", hooks=HooksConfig(timeout_seconds=3))["m"]
    assert entry.state is ModelState.READY
    assert entry.prepared.hook_timeout == 3
    assert marker.read_text() == "x"


def test_a_manifests_own_hook_timeout_wins(world, affine, tmp_path):
    bundle = copy(affine, tmp_path / "m", "def preprocess(inputs): return inputs\n")
    edit(bundle, "axis_order", "hooks: {timeout_seconds: 0.5}\naxis_order")
    assert world.load(tmp_path, hooks=HooksConfig(timeout_seconds=3))["m"].prepared.hook_timeout == 0.5


def run_aside(run):
    """On a thread of its own, since it lowers the priority of the one that it is on."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_hashing_of_weights_ends_when_the_server_stops(world, affine, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    copy(affine, tmp_path / "m")
    verify = loading_digests.verify_files

    def stopped_meanwhile(*arguments, **options):
        world.stopping.set()
        return verify(*arguments, **options)

    monkeypatch.setattr(loading_digests, "verify_files", stopped_meanwhile)
    world.load(tmp_path, bundles=BundlesConfig(digests="strict"))
    assert "model not loaded name=m phase=digests reason=stopping" in caplog.text


def test_strict_digests_refuse_what_programs_only_reports(world, affine, tmp_path, caplog):
    bundle = copy(affine, tmp_path / "m")
    (bundle / "vocab.txt").write_text("new")
    entry = world.load(tmp_path, bundles=BundlesConfig(digests="strict"))["m"]
    assert entry.reason.startswith("digests: bundle 'm': vocab.txt is not listed in files")
    entry = world.load(tmp_path)["m"]
    assert entry.state is ModelState.READY
    watch = DigestWatch(world.registry, world.stopping)
    watch.add(entry.prepared.model, Versions(entry.path))
    watch.close()
    run_aside(watch.run)
    assert world.registry.get("m").modified == ("vocab.txt",)
    assert "model modified name=m files=vocab.txt" in caplog.text


def test_what_was_edited_after_a_model_was_loaded_says_nothing_about_what_serves(world, affine, tmp_path):
    bundle = copy(affine, tmp_path / "m")
    entry = world.load(tmp_path)["m"]
    watch = DigestWatch(world.registry, world.stopping)
    watch.add(entry.prepared.model, Versions(entry.path))
    weights = bundle / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    watch.close()
    run_aside(watch.run)
    assert world.registry.get("m").modified == ()


def test_weights_may_be_mapped(world, affine):
    entry = world.load(affine.parent, runtime=RuntimeConfig(map_weights=True))["affine"]
    assert entry.prepared.model.weights.nbytes == 24


def test_once_stopping_nothing_more_is_prepared_and_nothing_is_called_failed(world, affine):
    world.stopping.set()
    entry = world.load(affine.parent)["affine"]
    assert entry.state is ModelState.PREPARING


def test_a_model_whose_rows_cannot_be_padded_takes_its_compiled_sizes_only(world, tmp_path):
    write_model(
        tmp_path / "sum",
        lambda x: (x.sum(),),
        {"x": ((N, 3), np.float32)},
        {"total": ((), np.float32)},
        batch_sizes=(2, 4),
    )
    prepared = world.load(tmp_path)["sum"].prepared
    assert prepared.rows.plan({"x": np.zeros((4, 3))}) == (4, ())
    with pytest.raises(Exception, match="exactly 2 or 4"):
        prepared.rows.plan({"x": np.zeros((3, 3))})


def test_an_error_without_words_is_told_by_its_type(world, affine, monkeypatch, caplog):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr("rsrv.serve.loading.digests.read_verified_program", no_memory)
    entry = world.load(affine.parent)["affine"]
    assert entry.state is ModelState.FAILED
    assert "model failed name=affine phase=digests error=MemoryError" in caplog.text


def test_a_model_py_that_never_returns_is_left_behind_when_the_server_stops(world, affine, tmp_path):
    threading.importing, threading.let_go = threading.Event(), threading.Event()  # for the hooks to find
    hooks = (
        "import threading\nthreading.importing.set()\nthreading.let_go.wait()\ndef preprocess(inputs): return inputs\n"
    )
    copy(affine, tmp_path / "stuck", hooks)
    loading = threading.Thread(target=world.load, args=(tmp_path,))
    loading.start()
    try:
        assert threading.importing.wait(60)
        world.stopping.set()
        loading.join(60)
        assert not loading.is_alive()
        assert world.registry.get("stuck").state is ModelState.PREPARING
    finally:
        threading.let_go.set()
        del threading.importing, threading.let_go
        loading.join()
