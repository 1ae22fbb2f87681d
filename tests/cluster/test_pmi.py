"""How MPI is told which processes share a node."""

import pytest

from tfdist.cluster.pmi import mapping_of


@pytest.mark.parametrize(
    ("nodes", "mapping"),
    [
        ((0, 0), "(vector,(0,1,2))"),
        ((0, 1), "(vector,(0,2,1))"),
        ((0, 0, 1, 1, 2, 2), "(vector,(0,3,2))"),
        ((0, 1, 0, 1), "(vector,(0,2,1),(0,2,1))"),
        ((0, 0, 0, 1), "(vector,(0,1,3),(1,1,1))"),
    ],
)
def test_mapping_lists_blocks_of_ranks_per_node(nodes, mapping):
    assert mapping_of(nodes) == mapping


def test_a_large_regular_job_has_a_short_mapping():
    assert mapping_of([rank // 8 for rank in range(8000)]) == "(vector,(0,1000,8))"
