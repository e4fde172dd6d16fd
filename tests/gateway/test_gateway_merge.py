"""Many texts of metrics become one that Prometheus takes, whatever a worker sends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rsrv.gateway.metrics.merge import LINE_BYTES, merge, read


def merged(*texts):
    return merge(read(text) for text in texts).decode()


def test_families_keep_the_order_in_which_they_were_seen_and_have_one_header():
    own = '# HELP up Up.\n# TYPE up gauge\nup{worker="a"} 1\n'
    first = '# HELP load L.\n# TYPE load gauge\nload{worker="a"} 2\n# HELP up B.\n# TYPE up counter\nup{worker="b"} 3\n'
    second = '\n# TYPE load gauge\n# a remark\nload{worker="b"} 4\n'
    assert merged(own, first, second) == (
        '# HELP up Up.\n# TYPE up gauge\nup{worker="a"} 1\nup{worker="b"} 3\n'
        '# HELP load L.\n# TYPE load gauge\nload{worker="a"} 2\nload{worker="b"} 4\n'
    )


def test_the_lines_of_a_histogram_and_of_a_counter_stay_under_their_header():
    text = (
        "# HELP t Time.\n# TYPE t histogram\n"
        't_bucket{le="1",worker="a"} 1\nt_bucket{le="+Inf",worker="a"} 2\n'
        't_sum{worker="a"} 3.5\nt_count{worker="a"} 2\n'
        't_created{worker="a"} 1e9\n# TYPE n counter\nn_total{worker="a"} 7\n'
    )
    other = text.replace('"a"', '"b"')
    assert merged(text, other).splitlines() == [
        *("# HELP t Time.", "# TYPE t histogram"),
        *(line for part in (text, other) for line in part.splitlines()[2:7]),
        "# TYPE n counter",
        'n_total{worker="a"} 7',
        'n_total{worker="b"} 7',
    ]


def test_a_sample_with_another_suffix_has_a_family_of_its_own():
    text = "# TYPE foo gauge\nfoo_bar 1\nfoo 2\nfoobar 3\n"
    assert merged(text) == "# TYPE foo gauge\nfoo 2\nfoo_bar 1\nfoobar 3\n"
    families = read(text).families
    assert list(families) == ["foo", "foo_bar", "foobar"]


def test_the_family_of_one_text_does_not_go_on_in_the_next():
    assert list(read("# TYPE foo counter\n").families) == ["foo"]
    assert merged("# TYPE foo counter\n", "foo_total 1\nbar 2\n") == "# TYPE foo counter\nfoo_total 1\nbar 2\n"
    together = merge([read("# TYPE foo counter\n"), read("foo_total 1\n# TYPE foo_total gauge\n")]).decode()
    assert together == "# TYPE foo counter\n# TYPE foo_total gauge\nfoo_total 1\n"


def test_lines_without_the_label_get_the_name_of_their_worker_and_others_are_left_alone():
    text = 'a 1\nb{x="1"} 2 1700000000000\nc{x="1",} 3\nd{worker="mine"} 4\ne{} 5\n'
    assert merge([read(text, 'w"0\\')]).decode().splitlines() == [
        'a{worker="w\\"0\\\\"} 1',
        'b{x="1",worker="w\\"0\\\\"} 2 1700000000000',
        'c{x="1",worker="w\\"0\\\\"} 3',
        'd{worker="mine"} 4',
        'e{worker="w\\"0\\\\"} 5',
    ]


def test_the_process_metrics_of_several_workers_are_told_apart():
    text = "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 1.5\n"
    assert merge([read(text), read(text, "w0"), read(text, "w1")]).decode() == (
        "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 1.5\n"
        'process_cpu_seconds_total{worker="w0"} 1.5\nprocess_cpu_seconds_total{worker="w1"} 1.5\n'
    )


def test_the_first_of_two_samples_with_the_same_labels_counts_even_under_two_families():
    assert merged('a{x="1"} 1\na{x="1"} 2\n', 'a{x="1"} 3\na{x="2"} 4\n') == 'a{x="1"} 1\na{x="2"} 4\n'
    assert merged("# TYPE a counter\na_total 1\n", "a_total 2\n") == "# TYPE a counter\na_total 1\n"


@pytest.mark.parametrize(
    "line",
    [
        "<html><body>not found</body></html>",
        "a",
        "a one",
        "1a 1",
        "a{x=1} 1",
        'a{x="1" 1',
        'a{x="1"y="2"} 1',
        'a{x="1",,} 1',
        'a{1x="1"} 1',
        'a{x="1",x="2"} 1',
        'a{__name__="b"} 1',
        'a{x="1"} 1 now',
        'a{x="1"} 1 9999999999999999999999',
        "a 1_000",
        "a 0x10",
        "a 1e999",
        "a -1e999",
        "a 1\r",
        "a 1\0",
        'a{x="\0"} 1',
        "a " + "1" * LINE_BYTES,
        '{x="1"} 1',
        "a{} {} 1",
    ],
)
def test_a_line_that_prometheus_would_not_take_is_left_out(line):
    text = read(f'before{{x="1"}} 1\n{line}\nafter 2\n')
    assert text.dropped == 1
    assert merge([text]) == b'before{x="1"} 1\nafter 2\n'


@pytest.mark.parametrize("value", ["1", "-1.5", "+2", ".5", "1.", "1e9", "1.5E-3", "NaN", "+Inf", "-Inf", "inf", "nan"])
def test_every_form_of_a_number_is_kept_as_it_is(value):
    assert merged(f"a {value}\n") == f"a {value}\n"


def test_headers_of_unknown_kinds_and_types_and_empty_ones_are_left_out():
    text = "# UNIT a seconds\n# TYPE a banana\n# TYPE a\n# HELP\n# TYPE 1a gauge\n# EOF\n#\n# HELP b \0\na 1\n"
    assert merged(text) == "a 1\n"
    assert read(text).dropped == 0


def test_bytes_that_are_no_utf_8_and_separators_of_lines_that_only_python_knows_do_no_harm():
    assert merge([read(b'a{x="\xff"} 1\n')]).decode() == 'a{x="�"} 1\n'
    assert merged('a{x="one\x85two\u2028three"} 1\n') == 'a{x="one\x85two\u2028three"} 1\n'


def test_escapes_in_labels_are_kept():
    line = r'a{x="quote \" backslash \\ line \n",y="}"} 1'
    assert merged(f"{line}\n") == f"{line}\n"
    (family,) = text_string_to_metric_families(merged(f"{line}\n"))
    assert family.samples[0].labels == {"x": 'quote " backslash \\ line \n', "y": "}"}


def test_a_text_without_a_sample_is_empty():
    for text in ("", "# TYPE a gauge\n", "<html>\n", "\n\n"):
        assert read(text).empty
        assert not merge([read(text)]) or "# TYPE a gauge" in text
    assert not read("a 1").empty


_PARTS = st.sampled_from(
    [
        *(
            "a",
            "b_total",
            "{",
            "}",
            '"',
            "\\",
            ",",
            "=",
            "x",
            "worker",
            " ",
            "\t",
            "\n",
            "\n",
            "1",
            "-",
            "e9",
            "NaN",
            "#",
        ),
        *("# TYPE a counter\n", "# HELP a text\n", 'a{x="1"} 1\n', "b_total 2\n", "\0", "\r", "é"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(_PARTS, max_size=30).map("".join), max_size=3))
def test_whatever_comes_the_result_is_a_text_without_a_double_sample_or_header(texts):
    whole = merge(read(text, f"w{number}") for number, text in enumerate(texts)).decode()
    list(text_string_to_metric_families(whole))
    lines = whole.splitlines() if "\r" not in whole else whole.split("\n")
    samples = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(set(samples)) == len(samples)
    headers = [tuple(line.split(" ")[1:3]) for line in lines if line.startswith("#")]
    assert len(set(headers)) == len(headers)
    assert merge([read(whole)]).decode() == whole


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing(body):
    list(text_string_to_metric_families(merge([read(body, "w")]).decode()))
