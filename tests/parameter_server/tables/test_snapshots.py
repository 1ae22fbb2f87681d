"""Tables go on from snapshots, on any number of servers."""

import functools

import keras
import numpy as np
import pytest

from tests.parameter_server.tables.test_tables import ask
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.key_hash import server_of
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.messages import Refused
from tfdist.parameter_server.protocol.tables import AttachTable, ExportTable, Lookup, TableAttached, UpdateRows
from tfdist.parameter_server.tables.snapshots import PREFIX, TableSnapshots
from tfdist.parameter_server.tables.tables import Tables

DIM = 2
ADAGRAD = keras.optimizers.serialize(keras.optimizers.Adagrad(0.5))
KEYS = np.arange(40, dtype=np.int64) ** 3


class Servers:
    """The tables of some servers, as of a worker."""

    def __init__(self, folder, count, incarnation=1, dim=DIM, optimizer=ADAGRAD):
        make = [
            functools.partial(TableSnapshots, folder, server=server, servers=count, seconds=60)
            for server in range(count)
        ]
        self.tables = [Tables(snapshots) for snapshots in make]
        self.incarnation = incarnation
        form = dim, "float32", InitialRows(), RowPolicy(), optimizer
        self.attached = [ask(tables, AttachTable, *form, incarnation=incarnation)[0] for tables in self.tables]

    def step(self, sequence, servers=None):
        for server in range(len(self.tables)) if servers is None else servers:
            keys = KEYS[server_of(KEYS, len(self.tables)) == server]
            gradients = np.full((len(keys), DIM), 1 + sequence, np.float32)
            ask(self.tables[server], Lookup, sequence, True, arrays=[keys], incarnation=self.incarnation)
            ask(self.tables[server], UpdateRows, sequence, arrays=[keys, gradients], incarnation=self.incarnation)

    def export(self):
        parts = [ask(tables, ExportTable, incarnation=self.incarnation)[1] for tables in self.tables]
        keys, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return keys[np.argsort(keys)], rows[np.argsort(keys)]

    def close(self):
        for tables in self.tables:
            for table in tables:
                table.close()


def after(folder, steps, count=2):
    servers = Servers(folder, count)
    for sequence in range(steps):
        servers.step(sequence)
    return servers


def assert_same(servers, other):
    for array, expected in zip(servers.export(), other.export(), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_servers_restores_the_table(tmp_path, count, caplog):
    after(tmp_path / "kept", 3).close()
    again = Servers(tmp_path / "kept", count)
    assert_same(again, after(tmp_path / "one", 3))
    again.step(3)
    assert_same(again, after(tmp_path / "other", 4))
    assert "and 3 updates" in caplog.text


def test_updates_that_a_snapshot_has_do_not_count_again(tmp_path):
    after(tmp_path, 3).close()
    again = Servers(tmp_path, 2)
    before = again.export()[1]
    again.step(2)
    np.testing.assert_array_equal(again.export()[1], before)
    another = Servers(tmp_path, 2, incarnation=2)
    another.step(2)
    assert (another.export()[1] != before).all()


def test_incomplete_snapshots_of_a_killed_job_are_skipped(tmp_path):
    after(tmp_path, 1).close()
    three = Servers(tmp_path, 3)
    three.step(1)
    three.close()
    again = Servers(tmp_path, 2)
    again.step(2, servers=[0])
    again.close()
    for path in tmp_path.glob("*/server-1-of-2*"):
        if path != min(tmp_path.glob("*/server-1-of-2*")):
            path.unlink()
    last = Servers(tmp_path, 2)
    assert_same(last, after(tmp_path / "expected", 2))


def test_two_files_of_each_server_are_kept(tmp_path):
    for sequence in range(4):
        servers = Servers(tmp_path, 2)
        servers.step(sequence)
        servers.close()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"{PREFIX}users-")
    assert len(list(folder.iterdir())) == 4, "two of each server"


def test_a_table_of_another_form_is_refused(tmp_path):
    after(tmp_path, 1).close()
    answers = Servers(tmp_path, 2, dim=3).attached
    assert all(isinstance(answer, Refused) for answer in answers)
    assert "another embedding" in answers[0].why
    assert all(isinstance(answer, TableAttached) for answer in Servers(tmp_path, 2).attached)


def test_table_names_cannot_leave_the_folder(tmp_path):
    for name in ("../../etc", "a/b", "a_b", ""):
        snapshots = TableSnapshots(tmp_path, name, 0, 1, 60)
        assert snapshots._folder.parent == tmp_path
    folders = {TableSnapshots(tmp_path, name, 0, 1, 60)._folder for name in ("a/b", "a_b")}
    assert len(folders) == 2
