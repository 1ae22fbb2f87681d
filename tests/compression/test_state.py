import numpy as np
import pytest

from tfdist.compression.state import State


def test_an_array_is_kept_as_long_as_it_fits():
    state = State()
    residual = state.array("residual", np.ones(3, np.float32))
    assert residual.tolist() == [0, 0, 0]
    residual += 5
    assert state.array("residual", np.empty(3, np.float32)) is residual
    for like in (np.empty(4, np.float32), np.empty(4, np.float64)):
        other = state.array("residual", like)
        assert (other.shape, other.dtype) == (like.shape, like.dtype)
        assert not other.any()


def draw(state, shared=False):
    return state.generator(shared).random()


def test_shared_generators_draw_equal_numbers_on_all_ranks():
    states = [State("x", rank, 3, seed=7) for rank in range(3)]
    assert len({draw(state, shared=True) for state in states}) == 1
    assert len({draw(state) for state in states}) == 3
    assert draw(states[0]) != draw(states[0], shared=True)


def test_numbers_differ_by_name_seed_and_step():
    states = [State("x"), State("y"), State("x", seed=1)]
    later = State("x")
    later.step = 1
    numbers = {draw(state) for state in (*states, later)}
    assert len(numbers) == 4
    assert draw(State("x")) == draw(State("x")), "in another run they are the same"
    states[0].generator().random(100)
    assert draw(states[0]) in numbers, "a generator begins anew"


def test_part_inherits_attributes_and_follows_the_step():
    state = State("x", rank=1, size=2, seed=3, shape=(4, 5))
    state.step = 6
    part = state.part("for 0")
    assert (part.name, part.rank, part.size, part.seed, part.shape, part.step) == ("x/for 0", 1, 2, 3, (4, 5), 6)
    state.step = 7
    assert state.part("for 0") is part
    assert part.step == 7
    assert draw(part) != draw(state.part("sum"))


def parts(*ends):
    return [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def divided(rank=0):
    """A tensor of 5 elements in two parts, each with a residual."""
    state = State(rank=rank, size=2)
    state.divide(parts(2, 5))
    state.part("for 0").array("residual", np.empty(2, np.float32))[...] = [1, 2]
    state.part("for 1").array("residual", np.empty(3, np.float32))[...] = [3, 4, 5]
    length = [2, 3][rank]
    state.part("sum").array("residual", np.empty(length, np.float32))[...] = 10
    return state


def test_new_state_has_no_parts():
    assert State().parts == []


def test_dividing_equally_again_keeps_residuals():
    state = divided()
    assert state.parts == parts(2, 5)
    state.divide(parts(2, 5))
    assert state.part("for 1").arrays["residual"].tolist() == [3, 4, 5]
    assert "residual" not in state.arrays


@pytest.mark.parametrize("others", [parts(4, 5), []])
def test_new_division_moves_residuals_of_parts_to_the_tensor(others):
    """Residuals keep their places; that of the sum belongs to this rank's part."""
    for rank, expected in enumerate([[11, 12, 3, 4, 5], [1, 2, 13, 14, 15]]):
        state = divided(rank)
        state.array("residual", np.empty(5, np.float32))[...] = 100
        state.divide(others)
        assert state.arrays["residual"].tolist() == [100 + value for value in expected]
        assert state.parts == others
        assert "residual" not in state.part("for 0").arrays


def test_division_without_residuals_creates_none():
    state = State(size=2)
    state.divide(parts(2, 5))
    state.part("for 0")
    state.divide([])
    assert "residual" not in state.arrays
    assert state.parts == []


def test_clear():
    state = divided()
    state.step = 4
    state.clear()
    assert (state.step, state.arrays, state.parts) == (0, {}, [])
    assert state.part("for 0").arrays == {}


def restored(saved, **made):
    state = State(**made)
    for path, array in saved.items():
        state.restore(path, array)
    return state


def test_saved_state_is_restored_in_any_order():
    """Paths of a checkpoint; the order does not matter."""
    state = divided(1)
    state.step = 9
    state.part("for 0")
    state.array("factor", np.empty((2, 2)))[...] = 0.5
    saved = dict(state.saved())
    assert {"step", "arrays/factor", "arrays/bounds", "parts/for 1/arrays/residual", "parts/sum/step"} <= set(saved)
    for order in (list(saved), list(reversed(saved))):
        loaded = restored({path: saved[path] for path in order}, rank=1, size=2)
        again = dict(loaded.saved())
        assert loaded.step == 9
        assert set(again) == set(saved)
        for path, array in saved.items():
            if not path.endswith("/step"):  # a part's step is the tensor's whenever it is used
                np.testing.assert_array_equal(again[path], array)
        assert loaded.parts == parts(2, 5)


def test_restored_array_is_a_copy():
    residual = np.ones(3)
    state = restored({"arrays/residual": residual})
    state.arrays["residual"] += 1
    assert residual.tolist() == [1, 1, 1]
