"""Work, depth and branches of graphs."""

import pytest

from tfdist.model_parallel.call_graph import Call, CallGraph


def graph(**calls):
    """Returns a graph of calls, which are given as names with their inputs' names and their costs."""
    names = list(calls)
    return CallGraph(
        [
            Call(name, "Dense", tuple(names.index(input_name) for input_name in inputs), cost, 0, 0)
            for name, (inputs, cost) in calls.items()
        ]
    )


def test_a_chain_has_no_branches():
    chain = graph(a=("", 1), b=("a", 2), c=("b", 3))
    assert (chain.work, chain.depth, chain.parallelism) == (6, 6, 1)
    assert chain.critical_path == ("a", "b", "c")
    assert chain.branches == ()


def test_two_branches():
    forked = graph(a=("", 1), b=("a", 5), c=("a", 2), d=("c", 2), e=(["b", "d"], 1))
    assert (forked.work, forked.depth) == (11, 7)
    assert forked.critical_path == ("a", "b", "e")
    (branches,) = forked.branches
    assert (branches.begin, branches.end) == ("a", "e")
    assert branches.parts == (("b",), ("c", "d"))
    assert branches.flops == (5, 4)
    assert branches.gain == 4


def test_branches_can_begin_at_the_inputs():
    two = graph(a=("", 3), b=("", 4), c=(["a", "b"], 1))
    (branches,) = two.branches
    assert branches.begin is None
    assert branches.gain == 3
    assert two.parallelism == pytest.approx(8 / 5)


def test_a_connection_that_skips_is_no_branch():
    skipped = graph(a=("", 1), b=("a", 5), c=(["a", "b"], 1))
    assert skipped.branches == ()
    assert skipped.depth == 7


def test_nested_branches_are_found_and_overlapping_ones_ignored():
    nested = graph(
        a=("", 1), b=("a", 1), c=("b", 3), d=("b", 3), e=(["c", "d"], 1), f=("a", 4), g=(["e", "f"], 1)
    )  # fmt: skip
    assert [(branch.begin, branch.end, branch.gain) for branch in nested.branches] == [("a", "g", 4), ("b", "e", 3)]
    crossed = graph(a=("", 1), b=("a", 1), c=("a", 1), d=(["b", "c"], 1), e=("c", 1), f=(["d", "e"], 1))
    assert {branch.end for branch in crossed.branches} == {"d"}, "those that meet in f share c"


def test_an_empty_graph():
    empty = CallGraph([])
    assert (empty.work, empty.depth, empty.parallelism, empty.critical_path, empty.branches) == (0, 0, 1.0, (), ())
