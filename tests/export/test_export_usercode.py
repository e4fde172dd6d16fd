from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from rsrv.core.errors import ExportError, UsageError
from rsrv.export.usercode import user_code


def failing() -> None:
    error = ValueError("two\nlines")
    error.add_note("the user's own note")
    error.add_note("--------\nFor simplicity, JAX has removed its internal frames from the traceback.")
    raise error


def test_an_exception_is_told_with_its_text_its_notes_and_the_users_frames() -> None:
    with pytest.raises(ExportError) as raised, user_code("loading", hint="look there"):
        failing()
    text = raised.value.message
    assert text.startswith("loading raised ValueError: two\nlines\nthe user's own note\n")
    assert "JAX has removed" not in text
    assert f'File "{__file__}"' in text
    assert "in failing" in text
    assert "rsrv/export" not in text
    assert raised.value.hint == "look there"
    assert isinstance(raised.value.__cause__, ValueError)


def test_errors_of_rsrv_pass_through_unchanged() -> None:
    with pytest.raises(UsageError, match="plain"), user_code("loading"):
        raise UsageError("plain")


def test_an_exception_from_deep_inside_a_package_keeps_the_frame_that_called_it() -> None:
    import json

    with pytest.raises(ExportError) as raised, user_code("parsing"):
        json.loads("{")
    assert "json.loads(" in raised.value.message
    assert "decoder.py" not in raised.value.message


@pytest.mark.parametrize("code", [0, 3, "no checkpoint"])
def test_user_code_that_ends_the_process_has_failed_even_with_success(code: object) -> None:
    with pytest.raises(ExportError, match=f"the factory raised SystemExit: {code}"), user_code("the factory"):
        sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda x: x if x.sum() > 0 else -x, "jax.lax.cond"),
        (lambda x: np.tanh(x), "use jax.numpy"),
        (lambda x: x[x > 0], "jnp.where"),
        (lambda x: x @ x, "look there"),
    ],
)
def test_a_mistake_that_everybody_makes_once_comes_with_its_way_out(function: Callable[..., Any], hint: str) -> None:
    with pytest.raises(ExportError) as raised, user_code("tracing", hint="look there"):
        jax.make_jaxpr(function)(np.ones((2, 3), np.float32))
    assert hint in (raised.value.hint or "")


def test_a_model_in_training_mode_is_told_to_be_put_in_inference_mode() -> None:
    module = nn.BatchNorm(use_running_average=False)
    x = np.ones((1, 4), np.float32)
    variables = module.init(jax.random.key(0), x)
    with pytest.raises(ExportError) as raised, user_code("tracing"):
        jax.make_jaxpr(module.apply)(variables, x)
    assert "inference mode" in (raised.value.hint or "")
