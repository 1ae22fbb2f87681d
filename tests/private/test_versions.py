"""The error for versions that do not fit, and what it says they were tried with."""

import configparser
from pathlib import Path

import keras
import tensorflow as tf

from tfdist.errors import IncompatibleKerasError
from tfdist.private import versions


def test_error_names_installed_and_tried_versions():
    error = versions.incompatible("Owner.made is gone")
    assert isinstance(error, (IncompatibleKerasError, ImportError))
    for said in (keras.__version__, tf.__version__, "Owner.made is gone", *versions.TRIED, *versions.TRIED_TENSORFLOW):
        assert said in str(error)


def test_oldest_tried_keras_is_the_minimum_requirement():
    project = configparser.ConfigParser()
    project.read(Path(__file__).parents[2] / "setup.cfg")
    assert f"keras>={versions.TRIED[0]}," in project["options"]["install_requires"].replace(" ", "")
