from tfdist.cli.findings import Finding, Level


def test_advice_is_left_out_where_there_is_nothing_to_do():
    assert Finding(Level.OK, "CPU", "2 cores").advice == ""
    assert [level.value for level in Level] == ["ok", "note", "PROBLEM"]
