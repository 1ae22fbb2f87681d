"""The notation of actions."""

import pytest

from tfdist.pipeline.actions import Action, ActionKind, parse


@pytest.mark.parametrize("text", ["0F0", "12B3", "1I20", "2W0"])
def test_text_of_parsed_action_equals_input(text):
    assert str(parse(text)) == text


def test_parse_returns_stage_kind_and_micro_batch():
    assert parse(" 12B3 ") == Action(12, ActionKind.BACKWARD, 3)


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "-1F0", "0F0 0F1", "0f0"])
def test_invalid_action_text_raises(text):
    with pytest.raises(ValueError, match=r"expected an action such as .*; got"):
        parse(text)
