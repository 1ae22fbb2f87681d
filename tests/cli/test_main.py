import pytest

import tfdist
from tfdist.cli import main


def test_every_command_describes_itself(capsys):
    for command in ("run", "bench", "doctor"):
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: tfdist {command}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["run"], ["run", "-n", "0", "x.py"], ["run", "-n", "2"]])
def test_wrong_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    assert "usage: tfdist" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--ps", "-1"], ["--evaluators", "one"]])
def test_numbers_of_other_roles(option, capsys):
    with pytest.raises(SystemExit):
        main.main(["run", "-n", "2", *option, "script.py"])
    assert "expected a whole number, got" in capsys.readouterr().err


def test_the_code_of_a_command_is_returned(capsys):
    assert main.main(["run", "-n", "2", "no_such_script.py"]) == 2
    assert "there is no file no_such_script.py" in capsys.readouterr().err
