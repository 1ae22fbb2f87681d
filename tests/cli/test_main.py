import argparse
import re
from pathlib import Path

import pytest

import tfdist
from tfdist.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
SOURCES = Path(tfdist.__file__).parent.rglob("*.py")


def commands():
    """The parser of each command."""
    actions = main.parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def test_documentation_lists_every_command_option_and_variable():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    listed = {}
    for name, parser in commands().items():
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        documented = re.findall(r"^\| (.*?) \|", sections[f"tfdist {name}"], re.MULTILINE)
        listed[name] = set(re.findall(r"(?<=`)--?[a-z]+[a-z-]*", " ".join(documented)))
        assert listed[name] == options, name
    assert {f"tfdist {name}" for name in listed} | {"Environment variables"} == set(sections)
    used = set(re.findall(r"TFDIST_[A-Z]+_?[A-Z]+", " ".join(path.read_text() for path in SOURCES)))
    assert set(re.findall(r"TFDIST_[A-Z_]+", sections["Environment variables"])) == used - {"TFDIST_REPORT_FD"}


def test_every_option_occurs_in_a_test():
    """In the tests of its command."""
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py") if path.name != "test_main.py"]
    for name, parser in commands().items():
        text = " ".join(string for string in texts if f'"{name}"' in string or f"{name}(" in string)
        given = [action.option_strings for action in parser._actions if {"-h"}.isdisjoint(action.option_strings)]
        missing = [names for names in given if names and not any(f'"{string}"' in text for string in names)]
        assert not missing, name


def test_every_command_describes_itself(capsys):
    for command in commands():
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: tfdist {command}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["run"],
        ["run", "-n", "0", "x.py"],
        ["run", "-n", "2"],
        ["doctor", "--timeout", "-5"],
        ["status", "host:1", "--seconds", "-1"],
    ],
)
def test_wrong_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    assert "usage: tfdist" in capsys.readouterr().err


def test_unknown_options_end_with_the_usage_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main.main(["run", "-n", "2", "--grace", "5", "script.py"])
    said = capsys.readouterr().err
    assert said.startswith("usage: tfdist run ")
    assert "tfdist run: error: " in said


@pytest.mark.parametrize("option", [["--ps", "-1"], ["--evaluators", "one"]])
def test_invalid_counts_of_other_roles_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main.main(["run", "-n", "2", *option, "script.py"])
    assert "expected a whole number of at least 0, got" in capsys.readouterr().err


def test_the_code_of_a_command_is_returned(capsys):
    assert main.main(["run", "-n", "2", "--timeline", ".", __file__]) == 2
    assert "cannot be written: it is a folder" in capsys.readouterr().err
    assert main.main(["run", "-n", "2", "no_such_script.py"]) == 2
    assert "there is no file no_such_script.py" in capsys.readouterr().err
