import pytest

from rsrv.serve.metrics import gpu_label
from rsrv.serve.series import SERIES


@pytest.mark.parametrize(
    ("platform", "visible", "ordinal", "label"),
    [
        ("cpu", "3", 0, ""),
        ("fake", None, 0, ""),
        ("cuda", "3", 0, "3"),
        ("cuda", "GPU-1b2c", 0, "GPU-1b2c"),
        ("cuda", "4,5,6", 1, "5"),
        ("cuda", "4,5", 7, "7"),
        ("cuda", None, 2, "2"),
        ("cuda", "", 2, "2"),
    ],
)
def test_the_gpu_is_named_as_operators_name_it(platform, visible, ordinal, label):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_label(platform, ordinal, environ) == label


def test_counters_end_in_total_and_nothing_else_does():
    assert all((series.type == "counter") == name.endswith("_total") for name, series in SERIES.items())
    assert all(series.help.endswith(".") for series in SERIES.values())
