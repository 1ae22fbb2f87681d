from tfdist.cli.findings import Finding, Severity


def test_advice_is_left_out_where_there_is_nothing_to_do():
    assert Finding(Severity.OK, "CPU", "2 cores").advice == ""
    assert [level.value for level in Severity] == ["ok", "note", "PROBLEM"]
