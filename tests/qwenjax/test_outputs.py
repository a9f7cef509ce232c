"""Results as their readers see them."""

from qwenjax.outputs import CompletionOutput, RequestMetrics


def test_an_output_is_finished_once_it_has_a_reason():
    output = CompletionOutput(index=0)
    assert not output.finished
    output.finish_reason = "length"
    assert output.finished


def test_time_to_first_token_counts_from_arrival():
    assert RequestMetrics(arrival=10.0).time_to_first_token is None
    assert RequestMetrics(arrival=10.0, first_token=10.5).time_to_first_token == 0.5
