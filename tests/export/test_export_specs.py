from __future__ import annotations

import pytest

from rsrv.core.dtypes import DType
from rsrv.core.errors import UsageError
from rsrv.export import InputSpec, parse_input_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("image=f32[1,3,224,224]", InputSpec("image", DType.F32, (1, 3, 224, 224))),
        (" ids=i64[ 8 ] ", InputSpec("ids", DType.I64, (8,))),
        ("scale=bf16[]", InputSpec("scale", DType.BF16, ())),
        ("a.b/c=bool[2]", InputSpec("a.b/c", DType.BOOL, (2,))),
    ],
)
def test_a_spec_gives_name_dtype_and_shape(text: str, spec: InputSpec) -> None:
    assert parse_input_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[1,2]", "not NAME=DTYPE[SIZES]"),
        ("x=f32", "not NAME=DTYPE[SIZES]"),
        ("x=f32[1", "not NAME=DTYPE[SIZES]"),
        ("=f32[1]", "not NAME=DTYPE[SIZES]"),
        ("x=float32[1]", "'float32' is not a dtype"),
        ("x=f32[0]", "'0' is not a positive integer"),
        ("x=f32[-1]", "'-1' is not a positive integer"),
        ("x=f32[1,,2]", "'' is not a positive integer"),
        ("x=f32[²]", "'²' is not a positive integer"),
    ],
)
def test_a_bad_spec_is_a_usage_error_that_names_the_part(text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_input_spec(text)
    assert says in raised.value.message
    assert raised.value.exit_code == 2
