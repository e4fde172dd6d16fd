"""The YAML reader: plain data, one document, bounded."""

import math

import pytest

from rsrv.core.yamlio import MAX_ALIASES, MAX_BYTES, MAX_DEPTH, MAX_NODES, YamlError, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        ("0777", "0777"),
        ("0x10", 16),
        ("0b11", 3),
        ("-7", -7),
        ("+7", 7),
        ("1_000", 1000),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("-1.5e-3", -0.0015),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("~", None),
        ("null", None),
        ("", None),
        ("'5'", "5"),
        ("'true'", "true"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("- 1\n- [a, {b: c}]", [1, ["a", {"b": "c"}]]),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("3: a", {3: "a"}),
        ("é: ü", {"é": "ü"}),
    ],
)
def test_plain_scalars_mean_what_json_users_expect(text, value):
    result = load_yaml(text, what="f")
    assert result == value
    assert type(result) is type(value)


def test_not_a_number_is_read_as_one():
    assert math.isnan(load_yaml(".nan", what="f"))


def test_bytes_are_read_as_utf8():
    assert load_yaml("naïve: 1".encode(), what="f") == {"naïve": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is there twice"),
        ("x:\n  - {k: 1, k: 2}", "line 2, column 12: the key 'k' is there twice"),
        ("!!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system is not accepted"),
        ("a: !!python/name:os.system ''", "the tag !!python/name:os.system is not accepted"),
        ("!!binary aGk=", "the tag !!binary is not accepted"),
        ("!!timestamp 2020-01-01", "the tag !!timestamp is not accepted"),
        ("!!set {a}", "the tag !!set is not accepted"),
        ("!mine 3", "the tag !mine is not accepted"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "merge keys (<<) are not accepted"),
        ("&a [*a]", "contains itself"),
        ("a: &a {b: [*a]}", "contains itself"),
        ("a: *nope", "undefined alias"),
        ("--- 1\n--- 2", "document"),
        ("a: {b", "expected ',' or '}'"),
        ("a: b: c", "mapping values are not allowed here"),
        ("? [a]\n: 1", "a list or mapping cannot be a key"),
        ("\ta: 1", "line 1"),
        ("a: \x00", "not readable"),
        (b"a: \xff\xfe", "not readable"),
        ("a: !!int x", "invalid literal"),
        ("a: " + "1" * 5000, "4300 digits"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_place(text, problem):
    with pytest.raises(YamlError) as caught:
        load_yaml(text, what="model/manifest.yaml")
    assert caught.value.message.startswith("model/manifest.yaml: ")
    assert problem in caught.value.message
    assert "\n" not in caught.value.message


def test_an_error_carries_its_line_and_column():
    with pytest.raises(YamlError) as caught:
        load_yaml("a: 1\nb: {\n", what="f")
    assert caught.value.line == 3
    assert caught.value.column == 1


def test_a_text_may_be_as_long_as_the_limit_and_no_longer():
    assert load_yaml("a" * 100, what="f", max_bytes=100) == "a" * 100
    with pytest.raises(YamlError, match="101 bytes; at most 100"):
        load_yaml("a" * 101, what="f", max_bytes=100)
    with pytest.raises(YamlError, match=f"at most {MAX_BYTES}"):
        load_yaml(b"#" * (MAX_BYTES + 1), what="f")


def test_the_limit_counts_bytes_and_not_characters():
    with pytest.raises(YamlError, match="8 bytes"):
        load_yaml("éééé", what="f", max_bytes=7)


def test_nesting_is_bounded():
    assert load_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, what="f") is not None
    with pytest.raises(YamlError, match="nested deeper"):
        load_yaml("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), what="f")
    with pytest.raises(YamlError, match="nested deeper"):
        load_yaml("[" * 100_000, what="f")


def test_nesting_through_aliases_is_bounded_too():
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, MAX_DEPTH + 2)]
    with pytest.raises(YamlError, match="nested deeper"):
        load_yaml("\n".join(lines), what="f")


def test_an_alias_bomb_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(YamlError, match=f"more than {MAX_NODES} values"):
        load_yaml("\n".join(lines), what="f")


def test_the_number_of_aliases_is_bounded():
    text = "a: &a 1\nb: [" + ", ".join(["*a"] * MAX_ALIASES) + "]"
    assert len(load_yaml(text, what="f")["b"]) == MAX_ALIASES
    with pytest.raises(YamlError, match=f"more than {MAX_ALIASES} aliases"):
        load_yaml(text.replace("]", ", *a]"), what="f")


@pytest.mark.parametrize("text", ['a: "\\ud800"', '"\\udfff": 1', 'a: ["\\uD83D\\uDE00"]'])
def test_half_of_a_surrogate_pair_is_refused_where_it_is_written(text):
    with pytest.raises(YamlError, match="half of a surrogate pair") as raised:
        load_yaml(text, what="f")
    assert raised.value.line == 1


def test_the_number_of_values_is_bounded_while_they_are_read():
    assert len(load_yaml("[1, 2, 3]", what="f", max_nodes=4)) == 3
    with pytest.raises(YamlError, match="more than 4 values") as raised:
        load_yaml("[1, 2, 3, 4, ]]]", what="f", max_nodes=4)
    assert raised.value.column == 11
