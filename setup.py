"""Builds the library of TensorFlow operations, if there is a C compiler; everything else is in setup.cfg."""

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


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
            ["tfdist/engine/shared_sums.c"],
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
