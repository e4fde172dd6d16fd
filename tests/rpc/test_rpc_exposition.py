"""Series as a table become the text of Prometheus, pulled anew at every scrape."""

from prometheus_client.parser import text_string_to_metric_families

from rsrv.rpc.exposition import Exposition, Series, histogram

TABLE = {
    series.name: series
    for series in (
        Series("calls_total", "counter", ("model",), "Calls."),
        Series("load", "gauge", ("worker",), "Load."),
        Series("wait_seconds", "histogram", (), "Waits."),
        Series("never", "gauge", (), "Nobody tells of it."),
    )
}


def families(exposition):
    found = text_string_to_metric_families(exposition.text().decode())
    return {family.name: family for family in found if family.name.startswith("test_")}


def test_samples_in_any_order_come_under_their_series_in_the_order_of_the_table():
    told = [
        ("load", ("w0",), 1.5),
        ("calls_total", ("a",), 1),
        ("load", ("w1",), 2.5),
        ("wait_seconds", (), histogram([0.5, 1.0], [1, 0, 2], 7.0)),
        ("calls_total", ("b",), 2),
    ]
    found = families(Exposition("test_", TABLE, lambda: told))
    assert list(found) == ["test_calls", "test_load", "test_wait_seconds"]
    assert [(sample.labels, sample.value) for sample in found["test_load"].samples] == [
        ({"worker": "w0"}, 1.5),
        ({"worker": "w1"}, 2.5),
    ]
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in found["test_wait_seconds"].samples] == [
        ("test_wait_seconds_bucket", "0.5", 1),
        ("test_wait_seconds_bucket", "1.0", 1),
        ("test_wait_seconds_bucket", "+Inf", 3),
        ("test_wait_seconds_count", None, 3),
        ("test_wait_seconds_sum", None, 7),
    ]


def test_constant_labels_are_on_every_sample_but_where_the_series_has_its_own():
    told = [("calls_total", ("a",), 1), ("load", ("w0",), 2)]
    found = families(Exposition("test_", TABLE, lambda: told, constant_labels={"worker": "me", "gpu": "0"}))
    assert found["test_calls"].samples[0].labels == {"model": "a", "worker": "me", "gpu": "0"}
    assert found["test_load"].samples[0].labels == {"worker": "w0", "gpu": "0"}


def test_nothing_is_kept_between_scrapes_and_the_process_tells_of_itself():
    told = [("calls_total", ("a",), 1)]
    exposition = Exposition("test_", TABLE, lambda: told)
    assert set(families(exposition)) == {"test_calls"}
    told.clear()
    assert families(exposition) == {}
    assert b"process_resident_memory_bytes" in exposition.text()
