import os
import socket
import sys
import types

import pytest

from tests.comm.mpi_process import mpi_process
from tfdist.comm import mpi_library
from tfdist.errors import MPIUnavailableError

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today\nMPICH Device:       ch4:{}\n\x00"


def mpi_of(version):
    """What is asked of `mpi4py.MPI` before it is initialized."""
    return types.SimpleNamespace(Get_library_version=lambda: version)


def loaded():
    mpi = mpi_library.load()
    before = mpi.Is_initialized()
    version, path = mpi_library.library(mpi)
    mpi_library.initialize_from_launcher(mpi)
    mpi_library.initialize_from_launcher(mpi)  # a second time it does nothing
    after = mpi.Is_initialized(), mpi.Query_thread() == mpi.THREAD_MULTIPLE
    mpi_library.finalize(mpi)
    return before, version, path, after, mpi.Is_finalized()


def test_mpi_is_loaded_initialized_and_finalized_in_separate_steps():
    with mpi_process(initialize=False) as call:
        before, version, path, after, finalized = call(loaded)
    assert not before
    assert version == version.strip()
    assert os.path.basename(path).startswith("libmpi")
    assert os.path.isfile(path)
    assert after == (True, True)
    assert finalized


def without_a_library():
    """As where mpi4py finds none: whatever it imports fails."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "mpi4py.MPI":
                raise RuntimeError("cannot load MPI library\nlibmpi.so.12: cannot open shared object file")

    sys.meta_path.insert(0, Finder())
    mpi_library.load()


def without_mpi4py():
    sys.modules["mpi4py"] = None
    mpi_library.load()


@pytest.mark.parametrize(
    ("missing", "words"),
    [(without_a_library, r"\(cannot load MPI library\)"), (without_mpi4py, "mpi4py")],
)
def test_no_library_says_what_to_do(missing, words):
    with mpi_process(initialize=False) as call, pytest.raises(MPIUnavailableError, match=words) as caught:
        call(missing)
    assert "Run `pip install mpich`" in str(caught.value)
    assert "\n" not in str(caught.value)


def called(version):
    return mpi_library.library(mpi_of(version))[0]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (MPICH, "MPICH 5.0.2"),
        ("Open MPI v5.0.3, package: Debian", "Open MPI v5.0.3, package: Debian"),
        ("  Intel(R) MPI Library 2021.11 for Linux* OS\n\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_library_name_is_the_first_version_line(mpi, version, name):
    assert mpi(called, version) == name


def from_a_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mpi_library.initialize_from_socket(mpi_of("Open MPI v5.0.3"), ours.fileno(), 0, 2, {})


def test_only_mpich_is_brought_up_without_a_launcher(mpi):
    with pytest.raises(
        MPIUnavailableError, match=r"can initialize only MPICH .* loaded library is Open MPI v5.0.3 from .*mpiexec"
    ):
        mpi(from_a_socket)


@pytest.fixture
def no_network_variables(monkeypatch):
    for name in mpi_library._NETWORK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_network_variables")
@pytest.mark.parametrize(
    ("device", "chosen"),
    [("ofi", {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}), ("ucx", {"UCX_NET_DEVICES": "lo"})],
)
def test_on_one_network_mpi_stays_on_the_loopback_interface(device, chosen):
    """By the library that it uses, which `ucx` and `ofi` call by different names."""
    settings = mpi_library.network_settings(mpi_of(MPICH.format(device)), one_network=True)
    assert settings == {"MPIR_CVAR_CH4_NETMOD": device, **chosen}


@pytest.mark.usefixtures("no_network_variables")
def test_over_several_networks_mpi_chooses_but_uses_no_shared_memory_of_ucx():
    assert mpi_library.network_settings(mpi_of(MPICH.format("ofi")), one_network=False) == {"UCX_TLS": "^sm"}


@pytest.mark.usefixtures("no_network_variables")
@pytest.mark.parametrize("name", mpi_library._NETWORK_VARIABLES)
def test_network_variables_set_by_the_user_are_kept(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert mpi_library.network_settings(mpi_of(MPICH.format("ofi")), one_network=True) == {}
