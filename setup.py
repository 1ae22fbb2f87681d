"""Builds the library of TensorFlow operations, if there is a C compiler; everything else is in setup.cfg."""

import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "tfdist/engine/shared_sums.c"
CHECKSUM = zlib.crc32(Path(SOURCE).read_bytes())


class BuildLibrary(build_ext):
    """Builds libraries that are no modules of Python, and have no names of modules."""

    def get_ext_filename(self, name):
        """Returns the path of the library of an extension."""
        return name.replace(".", "/") + ".library.so"


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "tfdist.engine.shared_sums",
            [SOURCE],
            define_macros=[("TFDIST_SOURCE", f'"built from {CHECKSUM:08x}"')],
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
