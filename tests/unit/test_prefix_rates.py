"""Loading is skipped when reading is faster, as measured; and it is tried again."""

from scissorhands_server.worker.prefix_rates import Rates


def test_what_was_never_measured_is_tried():
    rates = Rates(1.0)
    assert rates.worth(100, 1 << 40)
    rates.loaded(1000, 1.0)
    assert rates.worth(100, 1 << 40)
    assert rates.reading(10) == 0


def test_the_faster_one_is_chosen():
    rates = Rates(2.0)
    rates.loaded(1000, 1.0)
    rates.read(10, 1.0)
    assert rates.reading(50) == 5
    assert rates.worth(50, 2500)
    assert not rates.worth(50, 2501)
    rates.read(10, 3.0)
    assert rates.reading(10) == 1.6


def test_what_was_found_too_slow_is_tried_again():
    rates = Rates(1.0)
    rates.loaded(1000, 10.0)
    rates.read(100, 1.0)
    tries = [rates.worth(100, 1000) for _ in range(30)]
    assert tries.index(True) == 22
    rates.loaded(1000, 0.5)
    assert rates.worth(100, 1000)


def test_no_advantage_always_loads():
    rates = Rates(0)
    rates.loaded(1, 100.0)
    rates.read(1000, 0.001)
    assert rates.worth(1, 1 << 40)
