"""`tfdist serve`: runs a parameter server without the workers' script."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from tfdist.cluster import spec
from tfdist.cluster.settings import Timeouts
from tfdist.cluster.spec import Cluster
from tfdist.errors import ClusterSpecError, TfdistError


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "serve",
        help="serve as a parameter server, without a script",
        description='Serves as a parameter server until the job is over: the task of the job "ps" that TF_CONFIG, or '
        "--cluster and --index, describe. The options (synchronization, snapshots, …) are those of the workers' "
        "ParameterServerStrategy. It needs the job's TFDIST_SECRET, if there is one.",
    )
    parser.add_argument(
        "--cluster",
        metavar="JSON",
        help="the cluster, as in TF_CONFIG: "
        '\'{"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}\'',
    )
    parser.add_argument("--index", type=int, default=0, help='index of this server in the cluster\'s "ps" (default: 0)')
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module to import first, which registers optimizers, schedules or constraints of your own with "
        "@keras.saving.register_keras_serializable(); may be given several times",
    )
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # servers compute on the CPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        cluster = _cluster(options)
        _import(options.modules)
        from tfdist.runtime import serving  # loads TensorFlow, which is only worthwhile with valid arguments

        serving.serve_without_script(cluster, Timeouts.from_environment())
    except TfdistError as error:
        print(f"tfdist serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _cluster(options: argparse.Namespace) -> Cluster:
    """Returns the cluster, in which this task is a parameter server.

    Raises:
        ClusterSpecError: no cluster is given, or this task is not a parameter server.
    """
    if options.cluster is not None:
        try:
            jobs = json.loads(options.cluster)
        except ValueError as error:
            raise ClusterSpecError(f"--cluster is not JSON ({error}); got {options.cluster[:200]}") from None
        if not isinstance(jobs, dict):
            raise ClusterSpecError(f"--cluster must be a JSON object of jobs; got {options.cluster[:200]}")
        return spec.from_jobs(jobs, "ps", options.index, source="--cluster")
    cluster = spec.from_tf_config(os.environ.get("TF_CONFIG", ""))
    if cluster is None:
        raise ClusterSpecError(
            'expected a cluster with a job "ps": set TF_CONFIG to that of a parameter server, or give --cluster and '
            "--index"
        )
    if cluster.task.job != "ps":
        raise ClusterSpecError(
            f'expected TF_CONFIG of a task of the job "ps"; got {cluster.task}. Workers run the script that trains.'
        )
    return cluster


def _import(modules: list[str]) -> None:
    if modules and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise TfdistError(f"--import {module}: {error}. It must be importable from {os.getcwd()}.") from error
