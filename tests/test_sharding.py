import itertools

import pytest

from tfdist.sharding import EVERYONE, Ownership, Variable, VariablePart, assign_owners, assign_shards

MIB = 1 << 20


def covered(dealing, variables):
    """The rows of each variable that some server holds, each of them once."""
    rows = [[] for _ in variables]
    for part in itertools.chain.from_iterable(dealing.shards):
        rows[part.variable] += range(part.begin, part.end)
    return [sorted(held) for held in rows]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [()],
        [(0, 3)],
        [(784, 2048), (2048,), (2048, 2048), (2048,), (2048, 10), (10,)],
        [(1_000_000, 32), (), (5,)],
        [(3, MIB)],
        [(100,)] * 20,
    ],
)
def test_every_row_is_on_one_server(shapes, servers):
    variables = [Variable(shape, 4) for shape in shapes]
    dealing = assign_shards(variables, servers)
    assert covered(dealing, variables) == [list(range(shape[0] if shape else 1)) for shape in shapes]
    assert len(dealing.shards) == len(dealing.nbytes) == servers
    assert sum(dealing.nbytes) == sum(variable.nbytes for variable in variables)
    for shard, nbytes in zip(dealing.shards, dealing.nbytes, strict=True):
        assert list(shard) == sorted(shard, key=lambda part: part.variable)
        held = 0
        for part in shard:
            variable = variables[part.variable]
            rows = variable.shape[0] if variable.shape else 1
            held += variable.nbytes // max(rows, 1) * (part.end - part.begin)
        assert held == nbytes


def test_single_server_holds_all_rows():
    dealing = assign_shards([Variable((5, 3), 4), Variable((), 4)], 1)
    assert dealing.shards == ((VariablePart(0, 0, 5), VariablePart(1, 0, 1)),)


def test_a_large_variable_is_split_by_rows():
    dealing = assign_shards([Variable((1001, 1024), 4), Variable((1024,), 4)], 2)
    assert dealing.shards[0][0] == VariablePart(0, 0, 500)
    assert dealing.shards[1][0] == VariablePart(0, 500, 1001)
    assert dealing.shards[0][1] == VariablePart(1, 0, 1024), "on the server that has less by then"
    assert max(dealing.nbytes) - min(dealing.nbytes) <= 4096, "a row"


def test_unsplittable_variables_stay_whole():
    dealing = assign_shards([Variable((1000, 1024), 4, splits=False), Variable((1000, 1000), 4)], 2)
    assert sorted(len(shard) for shard in dealing.shards) == [1, 2]
    assert any(part == VariablePart(0, 0, 1000) for part in itertools.chain.from_iterable(dealing.shards))


def test_small_variables_stay_whole():
    dealing = assign_shards([Variable((100,), 4)] * 10, 2)
    assert all((part.begin, part.end) == (0, 100) for part in itertools.chain.from_iterable(dealing.shards))
    assert dealing.nbytes == (2000, 2000)


def test_variable_with_fewer_rows_than_servers_stays_whole():
    variables = [Variable((2, MIB), 4)]
    dealing = assign_shards(variables, 3)
    assert sorted(dealing.nbytes) == [0, 0, 8 * MIB]


def test_largest_shard_is_within_four_thirds_of_the_mean():
    """Graham's bound, on sizes that whole variables could fill evenly."""
    sizes = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    dealing = assign_shards([Variable((size,), 1) for size in sizes], 3)
    assert max(dealing.nbytes) <= 4 / 3 * sum(sizes) / 3


def test_zero_servers_raise():
    with pytest.raises(ValueError, match="at least one server; got 0"):
        assign_shards([Variable((3,), 4)], 0)


def test_owners_have_whole_variables_or_rows():
    variables = [Variable((10, MIB), 4), Variable((3,), 4), Variable((), 4), Variable((0, 2), 4)]
    large, *small = assign_owners(variables, 3)
    assert large == Ownership(None, (0, 3, 6, 10))
    assert [large.shape((10, MIB), rank) for rank in range(3)] == [(3, MIB), (3, MIB), (4, MIB)]
    assert [large.part(rank) for rank in range(3)] == [(slice(0, 3),), (slice(3, 6),), (slice(6, 10),)]
    assert large.is_cut
    assert large.holders == (0, 1, 2)
    assert all(large.includes(rank) for rank in range(3))
    for owner, shape in zip(small, [(3,), (), (0, 2)], strict=True):
        assert [owner.includes(rank) for rank in range(3)].count(True) == 1
        assert owner.shape(shape, owner.owner) == shape


def test_parts_along_another_axis_have_copies():
    """Six processes are three pairs, each of which has both parts."""
    owner = Ownership(None, (0, 2, 4), axis=1, places=(0, 1) * 3)
    assert [owner.part(rank) for rank in (0, 1, 5)] == [(slice(None), slice(0, 2)), *[(slice(None), slice(2, 4))] * 2]
    assert owner.shape((3, 4, 5), 1) == (3, 2, 5)
    assert owner.holders == (0, 1)
    assert owner.copies(6) == 3
    assert str(owner) == "axis 1 (0, 2, 4)"


def test_some_processes_may_have_no_part():
    """The last two of four processes are another stage of a pipeline."""
    owner = Ownership(None, (0, 2, 4), places=(1, 0, None, None))
    assert [owner.includes(rank) for rank in range(4)] == [True, True, False, False]
    assert owner.holders == (1, 0)
    assert owner.part(0) == (slice(2, 4),)


def test_everyone_has_all():
    assert not EVERYONE.is_cut
    assert EVERYONE.includes(3)
    assert EVERYONE.shape((3, 4), 1) == (3, 4)
    assert EVERYONE.copies(6) == 6
    assert Ownership(2).copies(6) == 1
    assert (EVERYONE.holders, Ownership(2).holders) == ((0,), (2,))
