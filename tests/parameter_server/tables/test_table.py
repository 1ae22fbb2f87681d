"""A table against a dict, and against plain Keras."""

import keras
import numpy as np
import pytest

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.key_hash import server_of
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.tables.table import EmbeddingTable

DIM = 2
INITIAL = InitialRows("normal", scale=1.0, seed=7)
MIN, MAX = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def table_of(optimizer=None, **policy):
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    return EmbeddingTable(DIM, keras.optimizers.serialize(optimizer), INITIAL, RowPolicy(**policy))


def keys_of(*keys):
    return np.array(keys, np.int64)


def initial(*keys):
    return INITIAL.rows(keys_of(*keys), DIM, np.dtype(np.float32))


def use(table, *keys):
    return table.lookup(keys_of(*keys), create=True)


def step(table, *keys, value=1.0):
    """One update; returns the number of rows in it."""
    return table.update(keys_of(*keys), np.full((len(keys), DIM), value, np.float32))


def after_steps(rows, *steps):
    """Rows after so many steps by gradients of 1 each, by SGD with a learning rate of 1."""
    return rows - np.array(steps, np.float32)[:, np.newaxis]


def present(table):
    return table.export()[0].tolist()


def test_rows_are_made_when_their_keys_are_first_used():
    table = table_of()
    keys = (3, -1, 3, MIN, MAX, 0)
    np.testing.assert_array_equal(use(table, *keys), initial(*keys))
    assert present(table) == [MIN, -1, 0, 3, MAX]
    assert step(table, MIN, 3) == 2
    np.testing.assert_array_equal(use(table, 3, 0, MIN, -1), after_steps(initial(3, 0, MIN, -1), 1, 0, 1, 0))


def test_lookup_without_creation_returns_the_same_rows():
    table, other = table_of(), table_of()
    use(table, 1, 2)
    step(table, 2)
    use(other, 1, 2)
    step(other, 2)
    for keys in ((1, 2, 5, 5, -9), (), (8,)):
        np.testing.assert_array_equal(table.lookup(keys_of(*keys), create=False), use(other, *keys))
    assert present(table) == [1, 2]
    assert present(other) == [-9, 1, 2, 5, 8]
    np.testing.assert_array_equal(table_of().lookup(keys_of(4), create=False), initial(4))


def test_lookups_are_not_changed_by_updates():
    table = table_of()
    rows = use(table, 1, 2)
    keys, values = table.export()
    rows[0] = 100
    step(table, 1, 2)
    np.testing.assert_array_equal(values, initial(1, 2))
    np.testing.assert_array_equal(use(table, 1, 2), initial(1, 2) - 1)
    assert keys.tolist() == [1, 2]


def test_gradients_of_a_key_are_summed_before_the_step():
    """With Adagrad a step by a sum is not the sum of steps."""
    table = table_of(keras.optimizers.Adagrad(0.5))
    use(table, 5, 6, 7)
    gradients = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], np.float32)
    assert table.update(keys_of(7, 5, 7, 99, 7), gradients) == 2
    other = table_of(keras.optimizers.Adagrad(0.5))
    use(other, 5, 6, 7)
    other.update(keys_of(5, 7), np.array([[3, 4], [15, 18]], np.float32))
    for array, expected in zip(table.export(), other.export(), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert table.iterations == 1
    assert table.dropped == 1


def test_gradients_of_keys_without_a_row_are_dropped():
    table = table_of()
    use(table, 1)
    assert step(table, 2, 3) == 0
    assert step(table, 2, 1) == 1
    assert present(table) == [1]
    assert table.dropped == 3
    assert table.iterations == 2


def test_readonly_unaligned_arrays_are_accepted():
    """Read-only, and not aligned."""

    def received(array):
        return np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)

    table = table_of(admit_after=2)
    keys, gradients = keys_of(4, -4, 4, 9), np.ones((4, DIM), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(table.lookup(received(keys), create=True), initial(*keys))
    assert table.update(received(keys), received(gradients)) == 3
    np.testing.assert_array_equal(use(table, *keys), after_steps(initial(*keys), 2, 1, 2, 1))


def test_empty_batches_are_accepted():
    table = table_of(keras.optimizers.Adam(0.1))
    assert use(table).shape == (0, DIM)
    assert table.lookup(keys_of(), create=False).dtype == np.float32
    assert step(table) == 0
    assert table.iterations == 1
    keys, values = table.export()
    assert (keys.shape, values.shape) == ((0,), (0, DIM))


def test_training_is_that_of_a_dense_embedding():
    """All keys in every step, in another order, and half of them twice."""
    optimizer = lambda: keras.optimizers.Adam(0.1, clipvalue=1.5)  # noqa: E731
    keys = np.random.default_rng(0).integers(MIN, MAX, 50)
    table = table_of(optimizer())
    variable = keras.Variable(use(table, *keys))
    plain = optimizer()
    plain.build([variable])
    for seed in range(4):
        generator = np.random.default_rng(seed)
        places = generator.permutation(np.concatenate([np.arange(50), np.arange(25)]))
        gradients = generator.normal(size=(75, DIM)).astype(np.float32)
        total = np.zeros((50, DIM), np.float32)
        np.add.at(total, places, gradients)
        plain.apply([keras.ops.convert_to_tensor(total)], [variable])
        table.update(keys[places], gradients)
    np.testing.assert_allclose(table.lookup(keys, create=False), variable.numpy(), rtol=1e-5, atol=1e-6)


def test_keys_are_admitted_by_their_third_use():
    """Several occurrences in a lookup are one use."""
    table = table_of(admit_after=3)
    use(table, 1, 1, 1, 2)
    use(table, 1)
    assert step(table, 1, 2) == 0
    assert (present(table), table.waiting) == ([], 2)
    np.testing.assert_array_equal(use(table, 1, 1, 3), initial(1, 1, 3))
    assert (present(table), table.waiting) == ([1], 2)
    assert step(table, 1, 2, 3) == 1
    table.lookup(keys_of(2, 2, 2), create=False)
    use(table, 2)
    assert present(table) == [1]
    np.testing.assert_array_equal(use(table, 1, 2), after_steps(initial(1, 2), 1, 0))
    assert (present(table), table.waiting) == ([1, 2], 1)


def test_rows_that_are_not_used_are_evicted():
    """And return as new rows, also for the optimizer."""
    table = table_of(keras.optimizers.SGD(1.0, momentum=0.5), evict_after=2)
    use(table, 1, 2, 3)
    step(table, 1, 2)
    step(table, 1)
    use(table, 2)
    assert present(table) == [1, 2, 3]
    table.lookup(keys_of(3), create=False)  # is no use
    step(table, 1)
    assert present(table) == [1, 2]
    step(table)
    step(table)
    assert present(table) == [1]
    np.testing.assert_array_equal(use(table, 2), initial(2))
    step(table, 2)
    np.testing.assert_array_equal(use(table, 2), initial(2) - 1)


def test_uses_of_keys_without_a_row_are_forgotten():
    table = table_of(admit_after=2, evict_after=1)
    use(table, 1, 2)
    step(table)
    use(table, 2)
    step(table)
    assert (present(table), table.waiting) == ([2], 0)
    use(table, 1)
    assert present(table) == [2]


def test_the_number_of_rows_is_bounded():
    table = table_of(max_rows=3)
    use(table, 1, 2, 3)
    step(table, 1, 3)
    use(table, 4)
    assert present(table) == [1, 3, 4]
    step(table, 3, 4)
    use(table, 1, 5)  # used in the same update as the others, 1 by this very lookup
    assert present(table) == [1, 4, 5]
    use(table, 10, 9, 8, 7, 6)
    assert present(table) == [6, 7, 8]
    np.testing.assert_array_equal(use(table, 6, 7, 8, 9), initial(6, 7, 8, 9))
    assert present(table) == [6, 7, 8], "rows of a lookup do not evict each other"


def test_the_least_used_rows_are_evicted():
    table = table_of(max_rows=3, evict_first="least_used")
    for keys in ((1, 2, 3), (1, 3), (1,)):
        use(table, *keys)
    step(table, 2)
    use(table, 4)
    assert present(table) == [1, 3, 4]
    use(table, 5)
    assert present(table) == [1, 3, 5]


def test_number_of_waiting_keys_is_bounded():
    table = table_of(max_rows=4, admit_after=2)
    use(table, 1, 2, 3)
    step(table)
    use(table, 4, 5, 6)
    assert table.waiting == 4
    use(table, 1, 2, 3, 4, 5, 6)
    assert present(table) == [3, 4, 5, 6]


class Model:
    """The rules of a table, a key at a time, with SGD and a learning rate of 1."""

    def __init__(self, policy):
        self.policy = policy
        self.rows, self.uses, self.last, self.now = {}, {}, {}, 0

    def lookup(self, keys, create):
        if create:
            distinct = sorted(set(keys))
            for key in distinct:
                self.uses[key] = self.uses.get(key, 0) + 1
                self.last[key] = self.now
            due = [key for key in distinct if key not in self.rows and self.uses[key] >= self.policy.admit_after]
            self.make_room(len(due), distinct)
            for key in due:
                if self.policy.max_rows is None or len(self.rows) < self.policy.max_rows:
                    self.rows[key] = initial(key)[0].copy()
                else:
                    self.forget(key)
        return np.array([self.rows[key] if key in self.rows else initial(key)[0] for key in keys]).reshape(-1, DIM)

    def make_room(self, new, kept):
        excess = len(self.rows) + new - (self.policy.max_rows or 1 << 60)
        if excess > 0:
            order = (
                (self.last, self.uses) if self.policy.evict_first == "least_recently_used" else (self.uses, self.last)
            )
            candidates = sorted(set(self.rows) - set(kept), key=lambda key: (order[0][key], order[1][key], key))
            for key in candidates[: excess + self.policy.max_rows // 16]:
                self.forget(key)

    def forget(self, key):
        self.rows.pop(key, None)
        del self.uses[key], self.last[key]

    def update(self, keys, gradients):
        self.now += 1
        for key, gradient in zip(keys, gradients, strict=True):
            if key in self.rows:
                self.rows[key] = self.rows[key] - gradient
                self.last[key] = self.now
        if self.policy.evict_after and self.now % max(1, self.policy.evict_after // 8) == 0:
            for key in [key for key, last in self.last.items() if self.now - last > self.policy.evict_after]:
                self.forget(key)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"evict_after": 3},
        {"evict_after": 20},
        {"max_rows": 40},
        {"max_rows": 40, "evict_first": "least_used", "evict_after": 10},
        {"admit_after": 3, "evict_after": 17},
        {"admit_after": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations_equal_the_model(policy, seed):
    """Gradients are whole numbers, so that sums do not depend on their order."""
    generator = np.random.default_rng(seed)
    universe = np.concatenate([generator.integers(MIN, MAX, 100), [MIN, MAX, 0, -1]])
    table, model = table_of(**policy), Model(RowPolicy(**policy))
    for _ in range(60):
        keys = generator.choice(universe, generator.integers(0, 30))
        if generator.random() < 0.6:
            create = bool(generator.random() < 0.7)
            np.testing.assert_allclose(table.lookup(keys, create), model.lookup(keys.tolist(), create), rtol=1e-5)
        else:
            gradients = generator.integers(-3, 4, (len(keys), DIM)).astype(np.float32)
            table.update(keys, gradients)
            model.update(keys.tolist(), gradients)
        assert present(table) == sorted(model.rows)
        assert table.waiting == len(model.uses) - len(model.rows)
    assert len(table) == len(model.rows) > 0


def test_rows_are_found_after_many_resizes():
    table = table_of(keras.optimizers.Adagrad(0.1))
    keys = np.random.default_rng(0).permutation(np.arange(-10000, 10000))
    begin = 0
    for size in (1, 2, 15, 1, 100, 900, 3000, 15981):
        part = keys[begin : begin + size]
        table.lookup(part, create=True)
        table.update(part, np.ones((size, DIM), np.float32))
        begin += size
    exported_keys, values = table.export()
    np.testing.assert_array_equal(exported_keys, np.sort(keys[:begin]))
    expected = INITIAL.rows(exported_keys, DIM, np.dtype(np.float32)) - 0.1 / np.sqrt(1.1)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    assert len(table) == begin == 20000


def trained(optimizer, servers, states=None, seeds=range(5), **policy):
    """Tables of several servers that take the same steps together."""
    tables = [table_of(optimizer(), **policy) for _ in range(servers)]
    for server, table in enumerate(tables if states else []):
        table.restore(states, server, servers)
    for seed in seeds:
        generator = np.random.default_rng(seed)
        keys = generator.integers(-60, 60, 80)
        gradients = generator.normal(size=(80, DIM)).astype(np.float32)
        held = server_of(keys, servers)
        for server, table in enumerate(tables):
            table.lookup(keys[held == server], create=True)
            table.update(keys[held == server], gradients[held == server])
    return tables


def merged(tables):
    """All arrays of all servers by key, and the scalars of the first."""
    states = [table.state() for table in tables]
    arrays = {}
    for prefix in ("", "waiting_"):
        order = np.argsort(np.concatenate([state[f"{prefix}keys"] for state in states]))
        for name in states[0]:
            if name.startswith("waiting_") == bool(prefix) and not name.startswith("scalar"):
                arrays[name] = np.concatenate([state[name] for state in states])[order]
    return arrays | {name: value for name, value in states[0].items() if name.startswith("scalar")}


def check_equal(arrays, other):
    assert arrays.keys() == other.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [
        (lambda: keras.optimizers.Nadam(0.1), {"admit_after": 2, "evict_after": 4}),
        (lambda: keras.optimizers.Ftrl(0.1), {"evict_after": 3}),
        (lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)), {}),
    ],
    ids=["Nadam", "Ftrl", "Adam"],
)
def test_snapshots_are_restored_on_any_number_of_servers(optimizer, policy):
    """Training goes on as if it had been on one server all the time."""
    expected = merged(trained(optimizer, 1, seeds=range(6), **policy))
    tables = trained(optimizer, 1, seeds=range(2), **policy)
    for servers, seeds in ((2, range(2, 4)), (3, range(4, 5)), (1, range(5, 6))):
        tables = trained(optimizer, servers, [table.state() for table in tables], seeds, **policy)
        assert all(len(table) for table in tables)
    check_equal(merged(tables), expected)
    assert tables[0].iterations == 6


def test_a_state_is_not_changed_by_later_updates():
    (table,) = trained(lambda: keras.optimizers.Adam(0.1), 1)
    state = table.state()
    kept = {name: array.copy() for name, array in state.items()}
    step(table, *range(-60, 60))
    check_equal(state, kept)


def test_restoring_replaces_everything():
    table = table_of()
    use(table, 1, 2)
    state = table.state()
    step(table, 1)
    use(table, 3)
    table.restore([state])
    np.testing.assert_array_equal(table.export()[1], initial(1, 2))
    assert (present(table), table.iterations) == ([1, 2], 0)


def test_restoring_without_admission_drops_waiting_keys():
    """Uses before are not counted any more."""
    table = table_of(admit_after=2)
    use(table, 1, 2)
    use(table, 1)
    other = table_of()
    other.restore([table.state()])
    assert (present(other), other.waiting) == ([1], 0)


def test_restoring_keeps_the_bound_and_the_learning_rate():
    table = table_of()
    table.set_learning_rate(0.5)
    use(table, 1, 2, 3)
    step(table, 2, 3)
    small = table_of(max_rows=2)
    small.restore([table.state()])
    assert present(small) == [2, 3]
    step(small, 2)
    np.testing.assert_array_equal(use(small, 2), initial(2) - 1)


def test_incompatible_snapshots_raise():
    table = table_of()
    use(table, 1)
    state = table.state()
    adam = table_of(keras.optimizers.Adam(0.1))
    with pytest.raises(ValueError, match="another embedding or optimizer: slot0 is missing; expected float32"):
        adam.restore([state])
    wide = EmbeddingTable(3, keras.optimizers.serialize(keras.optimizers.SGD(1.0)))
    with pytest.raises(ValueError, match=r"values is float32 with rows of shape \(2,\); expected .* \(3,\)"):
        wide.restore([state])
    with pytest.raises(ValueError, match="one server at least; got none"):
        table.restore([])
    assert present(table) == [1], "as it was before"
    with pytest.raises(ValueError, match="a key twice"):
        table.restore([state, state])
    assert present(table) == []


def test_learning_rate_can_be_set():
    table = table_of()
    table.set_learning_rate(0.25)
    use(table, 1)
    step(table, 1)
    np.testing.assert_array_equal(use(table, 1), initial(1) - 0.25)


class Anchored(keras.optimizers.Optimizer):
    """Each step begins at the row's first value."""

    def build(self, variables):
        super().build(variables)
        self.anchors = [self.add_variable_from_reference(reference, "anchor") for reference in variables]
        for anchor, variable in zip(self.anchors, variables, strict=True):
            anchor.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, self.anchors[0] - learning_rate * gradient)


def test_slots_can_start_with_the_rows_value():
    with keras.saving.custom_object_scope({"Anchored": Anchored}):
        table = table_of(Anchored(1.0))
        use(table, 1, 2)
        step(table, 2, value=5.0)
        step(table, 2, value=1.0)
    np.testing.assert_array_equal(use(table, 1, 2), after_steps(initial(1, 2), 0, 1))


def test_float64_rows_keep_small_updates():
    table = EmbeddingTable(DIM, keras.optimizers.serialize(keras.optimizers.SGD(1.0)), INITIAL, dtype="float64")
    rows = use(table, 1)
    assert rows.dtype == np.float64
    table.update(keys_of(1), np.full((1, DIM), 2.0**-40))
    np.testing.assert_array_equal(use(table, 1), rows - 2.0**-40)


def test_invalid_arguments_raise():
    sgd = keras.optimizers.serialize(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="dim must be a whole number of at least 1; got 0"):
        EmbeddingTable(0, sgd)
    with pytest.raises(ValueError, match='dtype must be "float32" or "float64"; got \'float16\''):
        EmbeddingTable(2, sgd, dtype="float16")
    table = table_of()
    with pytest.raises(TypeError, match="keys must be int64; got int32"):
        table.lookup(np.array([1], np.int32), create=True)
    with pytest.raises(ValueError, match=r"one dimension; got the shape \(1, 1\)"):
        table.lookup(np.array([[1]]), create=True)
    with pytest.raises(ValueError, match=r"gradients of shape \(2, 3\) for 2 keys of 2 columns"):
        table.update(keys_of(1, 2), np.ones((2, 3), np.float32))
    assert len(table) == table.iterations == 0


def test_new_optimizer_keeps_rows_and_waiting_keys():
    table = table_of(keras.optimizers.SGD(1.0, momentum=0.5), admit_after=2, evict_after=8)
    for _ in range(2):
        use(table, 1, 2)
    use(table, 3)
    step(table, 1)
    step(table, 1)
    table.set_optimizer(keras.optimizers.serialize(keras.optimizers.Adagrad(1.0, initial_accumulator_value=1.0)))
    assert (len(table), table.waiting, table.iterations) == (2, 1, 0)
    np.testing.assert_allclose(use(table, 1, 2), after_steps(initial(1, 2), 2.5, 0), rtol=1e-6)
    step(table, 2)
    expected = after_steps(initial(1, 2), 2.5, 1 / np.sqrt(2))
    np.testing.assert_allclose(use(table, 1, 2), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="clipnorm"):
        table.set_optimizer(keras.optimizers.serialize(keras.optimizers.SGD(1.0, clipnorm=1.0)))
    np.testing.assert_allclose(use(table, 1, 2), expected, rtol=1e-5)


def test_new_optimizer_keeps_the_age_of_rows():
    table = table_of(evict_after=8)
    use(table, 1, 2)
    for _ in range(6):
        step(table, 2)
    table.set_optimizer(keras.optimizers.serialize(keras.optimizers.SGD(1.0)))
    step(table, 2)
    step(table, 2)
    assert present(table) == [1, 2]
    step(table, 2)
    assert present(table) == [2], "not used for 9 updates"


def test_assignment_replaces_rows_and_their_slots():
    table = table_of(keras.optimizers.SGD(1.0, momentum=0.5))
    use(table, 1, 2)
    step(table, 1, 2)
    table.assign(keys_of(2, 3), np.full((2, DIM), 5, np.float32))
    assert present(table) == [1, 2, 3]
    step(table, 1, 2, 3)
    np.testing.assert_allclose(use(table, 1, 2, 3), [*after_steps(initial(1), 2.5), [4, 4], [4, 4]], rtol=1e-6)
    table.assign(keys_of(7), np.zeros((1, DIM), np.float32), is_whole=True)
    assert present(table) == [7]


def test_assigned_rows_are_admitted_and_make_room():
    table = table_of(admit_after=3, max_rows=2)
    use(table, 8)
    table.assign(keys_of(8, 9), np.zeros((2, DIM), np.float32))
    assert (present(table), table.waiting) == ([8, 9], 0)
    table.assign(keys_of(5), np.zeros((1, DIM), np.float32))
    assert (len(table), 5 in present(table)) == (2, True)
    with pytest.raises(ValueError, match="at most 2 rows"):
        table.assign(keys_of(1, 2, 3), np.zeros((3, DIM), np.float32))
