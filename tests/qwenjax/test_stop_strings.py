"""Stop strings over random splits of random text, against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.stop_strings import StopMatcher

LETTERS = st.text("ab你😀\n", max_size=24)  # few letters, so that stop strings occur and overlap
STOPS = st.lists(st.text("ab你😀\n", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


def split(text: str, data) -> list[str]:
    pieces = []
    while text:
        length = data.draw(st.integers(1, 4))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def first_stop(text: str, stops: list[str], allowed_from: int = 0) -> tuple[int, str] | None:
    """(end, stop) of the stop string complete first among those complete after `allowed_from` characters."""
    for end in range(allowed_from + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


@given(LETTERS, STOPS, st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_any_split_stops_where_a_search_of_the_whole_text_does(text, stops, include, data):
    matcher = StopMatcher(stops, include_in_output=include)
    seen = ""
    for piece in split(text, data):
        seen += matcher.feed(piece)
    seen += matcher.finish()
    found = first_stop(text, stops)
    if found is None:
        assert (seen, matcher.matched) == (text, None)
    else:
        end, stop = found
        assert (seen, matcher.matched) == (text[: end if include else end - len(stop)], stop)


@given(LETTERS, STOPS, st.data())
@settings(max_examples=400, deadline=None)
def test_just_what_could_begin_a_stop_string_is_held_back(text, stops, data):
    matcher = StopMatcher(stops)
    fed = passed = ""
    for piece in split(text, data):
        fed += piece
        passed += matcher.feed(piece)
        if matcher.matched:
            return
        held = fed[len(passed) :]
        assert passed + held == fed
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [fed[start:] for start in range(len(passed))]
        assert not any(stop.startswith(end) for stop in stops for end in longer)


@given(LETTERS, LETTERS, STOPS, st.data())
@settings(max_examples=300, deadline=None)
def test_no_stop_string_completed_before_min_tokens_ends_the_output(early, late, stops, data):
    matcher = StopMatcher(stops)
    seen = "".join(matcher.feed(piece, may_stop=False) for piece in split(early, data))
    assert matcher.matched is None
    seen += "".join(matcher.feed(piece) for piece in split(late, data)) + matcher.finish()
    found = first_stop(early + late, stops, allowed_from=len(early))
    expected = early + late if found is None else (early + late)[: found[0] - len(found[1])]
    assert (seen, matcher.matched) == (expected, found and found[1])


def test_held_text_comes_out_once_it_is_no_stop_string():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.feed(piece) for piece in ["Hi.\n", "\nUs", "ed"]] == ["Hi.", "", "\n\nUsed"]
    assert matcher.feed(" to\n\nUser: me") == " to"
    assert matcher.matched == "\n\nUser:"


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["END"], include_in_output=True)
    assert matcher.feed("an END and more") == "an END"
    assert (matcher.feed("more"), matcher.finish()) == ("", "")


def test_without_stop_strings_nothing_is_held():
    matcher = StopMatcher([])
    assert (matcher.feed("abc"), matcher.finish()) == ("abc", "")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string has at least one character"):
        StopMatcher(["a", ""])
