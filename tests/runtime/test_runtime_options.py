"""Options of the compiler: what the keys of autotuning mean, and that XLA is asked about them where it may refuse."""

import pytest

from rsrv.core.errors import ConfigError
from rsrv.runtime import CompileOptions, open_cache
from rsrv.runtime.options import compile_options
from rsrv.runtime.probe import require_usable_flags, require_usable_options

CACHE_ON = (
    ("xla_gpu_experimental_autotune_cache_mode", "AUTOTUNE_CACHE_MODE_UPDATE"),
    ("xla_gpu_per_fusion_autotune_cache_dir", "/tuning"),
)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, ()),
        ({"autotune": False}, (("xla_gpu_autotune_level", 0),)),
        ({"autotune_cache": True, "autotune_cache_dir": "/tuning"}, CACHE_ON),
        ({"autotune_cache_dir": "/tuning"}, CACHE_ON),
        ({"autotune_cache": False, "autotune_cache_dir": "/tuning"}, (("xla_gpu_per_fusion_autotune_cache_dir", ""),)),
        ({"autotune": False, "xla_options": {"--xla_gpu_autotune_level": 2}}, (("xla_gpu_autotune_level", 2),)),
    ],
)
def test_keys_of_autotuning_become_options_on_cuda(keys, wanted):
    assert compile_options(platform="cuda", **keys).overrides == wanted


def test_on_the_cpu_only_what_is_written_out_counts():
    options = compile_options({"b": 1, "a": True}, platform="cpu", autotune=False, autotune_cache_dir="/tuning")
    assert options.overrides == (("a", True), ("b", 1))


def test_a_cache_of_timings_without_a_directory_is_a_warning_and_stays_off(caplog):
    assert compile_options(platform="cuda", autotune_cache=True).overrides == ()
    assert "without runtime.autotune_cache_dir" in caplog.text


def test_xla_takes_every_option_that_the_keys_become(pool):
    for keys in ({"autotune": False}, {"autotune_cache_dir": "/tmp"}, {"autotune_cache": False}):
        require_usable_options(pool, compile_options(platform="cuda", **keys))


def test_an_option_that_xla_does_not_know_or_take_is_named_and_no_process_dies(pool):
    pool.inspect(b"module { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }")
    before = pool.pids
    with pytest.raises(ConfigError, match=r"runtime.xla_options: .*No such compile option: 'xla_nonsense'"):
        require_usable_options(pool, CompileOptions((("xla_nonsense", 1),)))
    with pytest.raises(ConfigError, match="'perhaps' is not a valid bool value"):
        require_usable_options(pool, CompileOptions((("xla_cpu_enable_fast_math", "perhaps"),)))
    assert pool.pids == before


def test_options_that_were_found_usable_are_not_tried_again(pool, tmp_path):
    class Nobody:
        def compile(self, *_):
            raise AssertionError("was asked again")

    options = CompileOptions((("xla_cpu_enable_fast_math", False),))
    cache = open_cache(tmp_path, {"device": "cpu"})
    require_usable_options(pool, options, cache)
    require_usable_options(Nobody(), options, cache)
    require_usable_options(Nobody(), CompileOptions())
    cache.close()


def test_without_flags_nobody_is_asked():
    require_usable_flags(None, {})
