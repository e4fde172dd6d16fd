import threading

import numpy as np
import pytest

from rsrv.bundle.hookfile import inspect_hooks
from rsrv.core.errors import BundleError, HookError, HookRejected
from rsrv.runtime.hooks import call_hook, load_hooks, register_model


def load(tmp_path, text, *, meta=False, name="m"):
    """What the loader does: the text first, then the run."""
    path = tmp_path / "model.py"
    path.write_text(text)
    for problem in inspect_hooks(path).problems(meta=meta):
        raise problem
    return load_hooks(path, name=name, incarnation=1, meta=meta)


def test_module_level_functions_are_the_hooks(tmp_path):
    hooks = load(tmp_path, "def preprocess(inputs): return {'x': inputs['x'] + 1}\n")
    assert hooks.preprocess is not None
    assert hooks.postprocess is None
    assert hooks.run is None
    np.testing.assert_array_equal(hooks.preprocess({"x": np.array([1])})["x"], [2])


def test_register_model_is_injected_and_importable_and_its_name_is_not_checked(tmp_path):
    injected = load(tmp_path, "register_model('other', postprocess=lambda outputs: outputs)")
    assert injected.preprocess is None
    assert injected.postprocess is not None
    imported = load(tmp_path, "from rsrv.serve import register_model\nregister_model(preprocess=lambda x: x)")
    assert imported.preprocess is not None


def test_the_file_sees_where_it_lives_and_a_fresh_module_every_time(tmp_path):
    (tmp_path / "vocab.txt").write_text("a b")
    text = """
from pathlib import Path
words = (BUNDLE_DIR / "vocab.txt").read_text().split() + [Path(__file__).parent.name, __name__]
count = globals().get("count", 0) + 1
def postprocess(outputs):
    raise rsrv.HookRejected(f"{words} {count}")
"""
    for _ in range(2):
        with pytest.raises(HookRejected, match=rf"\['a', 'b', '{tmp_path.name}', 'rsrv_bundle_m_1'\] 1"):
            load(tmp_path, text).postprocess({})


def test_a_meta_bundle_registers_run_in_either_form(tmp_path):
    assert load(tmp_path, "def run(inputs, call): return inputs", meta=True).run is not None
    assert load(tmp_path, "register_meta_model('m', run=lambda inputs, call: inputs)", meta=True).run is not None


@pytest.mark.parametrize(
    ("text", "meta", "problem"),
    [
        ("x = 1", False, "registers nothing"),
        ("x = 1", True, "registers nothing"),
        ("preprocess = 3", False, "registers nothing"),
        ("register_model()\nregister_model()", False, "registers 2 times"),
        (
            "def preprocess(x): return x\nregister_model(postprocess=preprocess)",
            False,
            "defines 'preprocess' and calls register_model",
        ),
        ("def run(inputs, call): return {}", False, "'run' has no place in a bundle of kind: model"),
        ("register_meta_model(run=lambda i, c: i)", False, "'register_meta_model' has no place"),
        ("def preprocess(x): return x", True, "'preprocess' has no place in a bundle of kind: meta"),
        ("register_model()", True, "'register_model' has no place"),
        ("def run(i, c): return i\ndef preprocess(x): return x", True, "'preprocess' has no place"),
        ("async def preprocess(inputs): return inputs", False, "'preprocess' is a coroutine"),
        # Forms that only a run can tell.
        (
            "if 1: register_model()\nif 1: register_model()",
            False,
            r"registers 2 times \(register_model, register_model\)",
        ),
        ("def preprocess(x): return x\nif 1: register_model()", False, "mixes register_model with"),
        ("if 1:\n def run(i, c): return i", False, "registers a meta model, but the manifest says kind: model"),
        ("if 1: register_meta_model(run=lambda i, c: i)", False, "registers a meta model"),
        ("if 1: register_model()", True, "registers the hooks of a model, but the manifest says kind: meta"),
        ("if 1:\n def run(i, c): return i\n def postprocess(x): return x", True, "a meta model has run only"),
        ("if 0: register_model()", False, "registers nothing"),
        ("register_model(preprocess=3)", False, r"register_model\(preprocess=…\) wants a function, got int"),
        (
            "\nimport nowhere_at_all\nregister_model()",
            False,
            "line 2: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("def (", False, "model.py:1: does not compile"),
        ("raise SystemExit(3)\nregister_model()", False, "line 1: SystemExit: 3"),
    ],
)
def test_a_wrong_registration_is_a_load_error_that_names_the_file(tmp_path, text, meta, problem):
    with pytest.raises(BundleError, match=problem) as error:
        load(tmp_path, text, meta=meta)
    assert "model.py" in error.value.message


def test_registration_outside_a_load_is_refused():
    with pytest.raises(BundleError, match="outside the load of a bundle"):
        register_model(preprocess=lambda x: x)


def test_bundles_that_load_at_the_same_time_do_not_see_each_other(tmp_path):
    both_inside = threading.Barrier(2, timeout=20)
    load_hooks.__globals__["_test_barrier"] = both_inside
    text = (
        "import rsrv.runtime.hooks as h\nh._test_barrier.wait()\n"
        "register_model(preprocess=lambda i: {'who': NAME})\nh._test_barrier.wait()\n"
    )
    results = {}

    def one(name):
        (tmp_path / name).mkdir()
        results[name] = load(tmp_path / name, f"NAME = {name!r}\n{text}", name=name)

    threads = [threading.Thread(target=one, args=(n,)) for n in ("a", "b")]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        del load_hooks.__globals__["_test_barrier"]
    assert {n: h.preprocess({})["who"] for n, h in results.items()} == {"a": "a", "b": "b"}


def call(hook, arrays=None):
    return call_hook(hook, arrays or {}, model="m", role="preprocess")


def test_arrays_come_back_in_c_order_and_scalars_keep_their_rank():
    result = call(lambda a: {"t": a["x"].T, "s": np.array(2.0)}, {"x": np.arange(6).reshape(2, 3)})
    assert result["t"].flags.c_contiguous
    assert result["s"].shape == ()
    np.testing.assert_array_equal(result["t"], np.arange(6).reshape(2, 3).T)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "returned None, wanted dict"),
        ([np.zeros(1)], "returned list, wanted dict"),
        ({"x": 3}, "returned int for 'x'"),
        ({"x": np.float32(3)}, "returned float32 for 'x'"),
        ({3: np.zeros(1)}, "returned the key 3"),
    ],
)
def test_anything_but_a_dict_of_arrays_is_a_hook_error(value, text):
    with pytest.raises(HookError, match=text) as error:
        call(lambda _: value)
    assert error.value.reason == "hook_error"


def test_a_hook_may_reject_data_and_every_other_exception_keeps_its_text_to_the_log(caplog):
    def reject(_):
        raise HookRejected("no such word")

    def secret(_):
        raise ValueError("password=1234")

    with pytest.raises(HookRejected, match="no such word"):
        call(reject)
    with pytest.raises(HookError, match="hook preprocess of model 'm' raised ValueError") as error:
        call(secret)
    assert "1234" not in error.value.message
    assert "1234" in caplog.text


def test_a_hook_that_pops_from_its_inputs_does_not_touch_the_callers_dict():
    arrays = {"x": np.zeros(1)}
    call(lambda a: {"y": a.pop("x")}, arrays)
    assert list(arrays) == ["x"]
