import numpy as np
import pytest

from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.worker.model import Model

SHAPES = [(1000, 100), (100,), (), (7, 3)]
PATHS = ["large", "bias", "scalar", "small"]
FLOATS = [np.dtype(np.float32)] * 4


def model_of(servers, splits=(True,) * 4, paths=PATHS, optimizer="SGD"):
    return Model(paths, SHAPES, FLOATS, servers, splits, optimizer)


def values():
    generator = np.random.default_rng(0)
    return [np.asarray(generator.normal(size=shape), np.float32) for shape in SHAPES]


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_parts_join_to_the_whole_model(servers):
    model = model_of(servers)
    momenta = [{"momentum": value + 1} for value in values()]
    state = TrainingState(values(), momenta, {"iteration": np.array(3)})
    parts = [model.part_of(server, state) for server in range(servers)]
    for part, shapes in zip(parts, model.shapes, strict=True):
        assert [value.shape for value in part.values] == shapes.shapes
        assert [slots["momentum"].shape for slots in part.slots] == shapes.shapes
        assert part.scalars is state.scalars
    whole = model.whole_state(parts)
    for array, slots, other in zip(whole.values, whole.slots, values(), strict=True):
        np.testing.assert_array_equal(array, other)
        np.testing.assert_array_equal(slots["momentum"], other + 1)
    assert whole.scalars is state.scalars


def test_slots_of_another_shape_stay_with_variables_on_one_server():
    model = model_of(2)
    split = {part.variable for shard in model.dealing.shards for part in shard if part.begin}
    state = TrainingState(values(), [{"factor": np.arange(7.0)} for _ in values()], {"iteration": np.array(3)})
    whole = model.whole_state([model.part_of(server, state) for server in range(2)])
    for place, slots in enumerate(whole.slots):
        if place in split:
            assert not slots
        else:
            np.testing.assert_array_equal(slots["factor"], np.arange(7.0))


def test_servers_are_told_which_rows_they_hold():
    model = model_of(2)
    described = [HeldRows(path, 0, 0, 0, decays=path != "bias") for path in PATHS]
    held = [part for server in range(2) for part in model.held(server, described)]
    assert sorted((part.begin, part.end) for part in held if part.path == "large") == [(0, 500), (500, 1000)]
    assert [part.decays for part in held if part.path == "bias"] == [False]


def test_unsplittable_variables_stay_whole():
    model = model_of(2, splits=(False, True, True, True))
    assert sum(part.variable == 0 for shard in model.dealing.shards for part in shard) == 1


def test_different_models_have_different_names():
    model = model_of(2)
    others = [model_of(2, splits=(False,) * 4), model_of(2, paths=["other", *PATHS[1:]]), model_of(2, optimizer="Adam")]
    assert model.name == model_of(3).name
    assert len({model.name, *(other.name for other in others)}) == 4


def test_paths_are_numbered_as_in_a_new_process():
    paths = ["dense_4/kernel", "dense_5/kernel", "head/kernel", "dense_6/kernel"]
    model = model_of(2, paths=paths)
    assert model.paths == ["dense/kernel", "dense/kernel#1", "head/kernel", "dense/kernel#2"]
    assert model.name == model_of(1, paths=["dense/kernel", "dense_1/kernel", "head/kernel", "dense_2/kernel"]).name
