import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.seams.once import Once


def test_a_thread_that_comes_meanwhile_waits_and_does_nothing():
    begun, others_come, ran = threading.Event(), threading.Event(), []

    @Once
    def install():
        """Installs the hooks."""
        begun.set()
        assert others_come.wait(10)
        ran.append("installed")

    assert (install.__name__, install.__doc__, install.is_done) == ("install", "Installs the hooks.", False)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(install)
        assert begun.wait(10)
        second = threads.submit(lambda: install() or list(ran))
        others_come.set()
        first.result(10)
        assert second.result(10) == ["installed"]
    install()
    assert ran == ["installed"]
    assert install.is_done


def test_failed_installation_runs_again():
    ran = []

    @Once
    def install():
        ran.append(1)
        if len(ran) == 1:
            raise ImportError("not this Keras")

    with pytest.raises(ImportError, match="not this Keras"):
        install()
    install()
    install()
    assert len(ran) == 2


def test_features_install_each_other():
    ran = []
    inner = Once(lambda: ran.append("inner"))
    outer = Once(lambda: inner() or ran.append("outer"))
    outer()
    assert ran == ["inner", "outer"]
