import pytest

from tfdist.collectives import cost
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.cost import Calibration, CostModel, Level, cheapest

SLOW_LINE = Calibration(Level(1e-6, 1e-10), Level(1e-4, 1e-8), 1e-10, 0.0)
MIB = 2**20


def model(hosts, calibration=SLOW_LINE):
    return CostModel(tuple(hosts), calibration)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ring_on_one_machine_is_the_formula(size):
    seconds = model([0] * size).seconds("ring", MIB)
    steps, share = 2 * (size - 1), MIB / size
    assert seconds == pytest.approx(steps * (1e-6 + share * 1e-10) + (size - 1) * share * 1e-10)


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (4, 2), (8, 3)])
def test_powers_of_two_are_the_formulas(size, rounds):
    cost_model = model([0] * size)
    exchanged, added = MIB * 1e-10, MIB * 1e-10
    assert cost_model.seconds("butterfly", MIB) == pytest.approx(rounds * (1e-6 + exchanged + added))
    assert cost_model.seconds("tree", MIB) == pytest.approx(rounds * (2e-6 + 2 * exchanged + added))
    assert cost_model.seconds("naive", MIB) == pytest.approx((size - 1) * (1e-6 + exchanged + added))
    part = (size - 1) / size
    assert cost_model.seconds("reduce_scatter_gather", MIB) == pytest.approx(
        rounds * 2e-6 + 2 * part * exchanged + part * added
    )


def test_hierarchy_spares_the_slow_line():
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    nbytes = 64 * MIB
    flat, levels = model(hosts).seconds("ring", nbytes), model(hosts).seconds("hierarchical", nbytes)
    # On the link: 2(P-1)/P of the vector in the flat ring, 2(H-1)/H in the ring of machines.
    assert flat / levels == pytest.approx((7 / 8) / (1 / 2), rel=0.1)


def test_ranks_of_one_machine_share_its_line():
    apart, together = model([0, 1, 0, 1]), model([0, 0, 1, 1])
    assert apart.seconds("ring", 64 * MIB) == pytest.approx(2 * together.seconds("ring", 64 * MIB), rel=0.05)


@pytest.mark.parametrize("hosts", [(0, 0), (0,) * 5, (0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 1)])
@pytest.mark.parametrize("algorithm", cost._MODELS)
def test_nothing_is_faster_than_the_bound(hosts, algorithm):
    for nbytes in (4, 1000, MIB, 100 * MIB):
        assert model(hosts).seconds(algorithm, nbytes) >= 0.999 * model(hosts).bound(nbytes)


def test_cheapest_algorithm_depends_on_size_and_hosts():
    assert cheapest((0,) * 8, 64, SLOW_LINE) == "butterfly"
    assert cheapest((0,) * 8, 64 * MIB, SLOW_LINE) in ("ring", "reduce_scatter_gather")
    assert cheapest((0, 0, 0, 0, 1, 1, 1, 1), 64 * MIB, SLOW_LINE) == "hierarchical"
    assert cheapest((0,), 64, SLOW_LINE) == "ring"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ring_of_machines_is_the_formula(size):
    """Each machine has a line of its own."""
    seconds = model(range(size)).seconds("ring", MIB)
    steps, share = 2 * (size - 1), MIB / size
    assert seconds == pytest.approx(steps * (1e-4 + share * 1e-8) + (size - 1) * share * 1e-10)


def test_every_algorithm_has_a_cost_but_that_of_mpi():
    assert set(cost._MODELS) == set(ALGORITHMS) - {"mpi"}
