from tfdist.parameter_server.protocol.report import ModelReport, WorkerReport, merge_reports


def test_reports_of_several_servers_are_merged():
    """The second server has not yet counted the last push of worker 0, and has never seen worker 2."""
    first = ModelReport(
        *("Adam-1", 0, 3, 100, 7, 1000, 2000, {0: 5, 2: 2}),
        (WorkerReport(0, True, True, 4, 4, 0, 1.5), WorkerReport(2, False, False, 0, 3, 1, 0.0)),
    )
    second = ModelReport("Adam-1", 0, 1, 50, 6, 500, 900, {0: 6}, (WorkerReport(0, True, False, 3, 3, 0, 0.25),))
    assert merge_reports([first, second]) == ModelReport(
        *("Adam-1", 0, 4, 150, 7, 1500, 2900, {0: 5, 2: 2}),
        (WorkerReport(0, True, True, 4, 4, 0, 1.75), WorkerReport(2, False, False, 0, 3, 1, 0.0)),
    )
