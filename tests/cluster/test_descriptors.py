import resource
import subprocess
import sys

from tfdist.cluster import descriptors

PROGRAM = """
import resource
from tfdist.cluster import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
print(descriptors.raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_soft_file_limit_is_raised_to_the_hard_limit():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout == "256 (256, 256)\n"


def test_unlimited_files_return_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptors.raise_file_limit() is None
