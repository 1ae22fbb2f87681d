"""The docs are correct: Python blocks run, commands and their options exist, and links resolve."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multiprocess import harness
from tfdist.cli.main import parser
from tfdist.cluster import spec

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

COMMANDS = ("tfdist", "make", "pip", "python", "mpiexec", "srun", "git", "source", "export", ".", "#!/bin/bash")


@dataclass(frozen=True)
class Block:
    where: str
    language: str
    text: str


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            yield Block(f"{page.relative_to(ROOT)}:{line}", match[1].strip(), match[2])


BLOCKS = list(blocks())


def blocks_in(*languages):
    return [pytest.param(block, id=block.where) for block in BLOCKS if block.language in languages]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """One process runs all blocks."""
    folder = tmp_path_factory.mktemp("blocks")
    told = [{"where": block.where, "code": block.text} for block in BLOCKS if block.language == "python"]
    (folder / "blocks.json").write_text(json.dumps(told))
    harness.run([str(harness.PROGRAMS / "doc_blocks.py"), str(folder)], 1)
    return json.loads((folder / "failures.json").read_text())


@pytest.mark.multiprocess
@pytest.mark.parametrize("block", blocks_in("python"))
def test_python_runs_as_it_stands(block, failures):
    assert block.where not in failures, failures[block.where]


def commands(text):
    """The commands of a block, without comments, settings of the environment and launchers."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


CONSOLE = [
    pytest.param(block, id=block.where)
    for block in BLOCKS
    if block.language in ("", "bash", "console", "sh") and block.text.split()[0] in COMMANDS
]


@pytest.mark.parametrize("block", CONSOLE)
def test_commands_exist(block):
    usage = "[" in block.text and "|" in block.text  # a synopsis, not something to be typed
    for words in commands(block.text) if not usage else ():
        check_command(words)
    check_options(block.text)


def check_command(words):
    name, *rest = words
    if name in ("mpiexec", "srun"):
        rest = rest[next(place for place, word in enumerate(rest) if word in ("python", "tfdist")) :]
        check_command(rest)
    elif name == "tfdist":
        check_arguments(rest)
    elif name == "make":
        for target in rest:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
    elif name == "pip":
        check_installed(rest)
    elif name == "python" and "/" in rest[0]:
        assert (ROOT / rest[0]).exists(), rest[0]
    else:
        assert name in COMMANDS, f"unknown command: {name}"


def check_arguments(arguments):
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
            parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"tfdist {shlex.join(arguments)}: {error.getvalue()}")


def check_installed(words):
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    for target in (word for word in words[1:] if "[" in word):
        name, extras = re.fullmatch(r"(.*)\[(.*)\]", target).groups()
        if name == ".":
            for extra in extras.split(","):
                assert extra in settings["options.extras_require"], f"no extra {extra}"
        assert name != "tfdist", "no index has tfdist: install it from a clone"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_options_in_text_exist(page):
    """Links, files of the repository, and options of commands in the running text."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"no {target}"
    for code in re.findall(r"`([^`\n]+)`", text):
        check_options(code)
        for path in re.findall(r"(?:^|\s)((?:benchmarks|examples|tests|docs)/[\w/]+\.\w+)", code):
            assert (ROOT / path).exists(), f"no {path}"
        if code.startswith("make "):
            check_command(code.split()[:2])
        if code.startswith("pip install "):
            check_installed(shlex.split(code)[1:])


def check_options(text):
    """Each ``--option`` after ``tfdist run`` and the like is one of it."""
    for line in text.splitlines():
        if match := re.search(r"tfdist (run|bench|doctor)\b(.*)", line):
            (commands,) = (action for action in parser()._actions if action.choices and "run" in action.choices)
            known = commands.choices[match[1]]._option_string_actions
            arguments = re.split(r"\s-m\s|\.py\b", match[2].partition(" #")[0])[0]
            for option in re.findall(r"(?<![\w-])--[a-z-]+", arguments):
                assert option in known, f"tfdist {match[1]} has no {option}"


@pytest.mark.parametrize("block", blocks_in("json"))
def test_json_blocks_are_valid_tf_configs(block):
    assert spec.from_tf_config(block.text) is not None


@pytest.mark.parametrize("block", blocks_in("yaml"))
def test_yaml_gives_each_pod_its_cluster(block):
    """The shell makes TF_CONFIG of the pod's index."""
    count = int(re.search(r"completions: (\d+)", block.text)[1])
    script = re.search(r"export TF_CONFIG=.*?'}}'", block.text, re.DOTALL)[0] + '; printf %s "$TF_CONFIG"'
    for index in range(count):
        env = {"JOB_COMPLETION_INDEX": str(index)}
        config = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
        cluster = spec.from_tf_config(config)
        assert (cluster.rank, cluster.size) == (index, count)
