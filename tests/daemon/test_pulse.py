"""What counts as progress of the daemon itself."""

from daemon.pulse import MAX_LATE_S, MAX_STILL_S, Pulse


class Part:
    """Something that counts its rounds."""

    def __init__(self) -> None:
        self.rounds = 0


def pulse_of(**parts: Part) -> Pulse:
    return Pulse({name: lambda part=part: part.rounds for name, part in parts.items()})  # type: ignore[misc]


def test_parts_that_make_their_rounds_are_well() -> None:
    http, beat = Part(), Part()
    pulse = pulse_of(http=http, beat=beat)
    for now_s in range(0, 60, 10):
        assert pulse.trouble(float(now_s), late_s=0.0) is None
        http.rounds += 100
        beat.rounds += 1


def test_one_part_that_stands_still_in_a_turning_loop_is_named() -> None:
    http, beat = Part(), Part()
    pulse = pulse_of(http=http, beat=beat)
    assert pulse.trouble(0.0, late_s=0.0) is None
    http.rounds += 1
    assert pulse.trouble(MAX_STILL_S + 0.1, late_s=0.0) == "no progress of beat"


def test_looks_that_follow_each_other_faster_than_rounds_see_no_trouble() -> None:
    pulse = pulse_of(beat=Part())
    assert pulse.trouble(0.0, late_s=0.0) is None
    assert pulse.trouble(1.0, late_s=0.0) is None


def test_a_part_that_goes_on_again_is_well_again() -> None:
    beat = Part()
    pulse = pulse_of(beat=beat)
    pulse.trouble(0.0, late_s=0.0)
    assert pulse.trouble(20.0, late_s=0.0) is not None
    beat.rounds += 1
    assert pulse.trouble(30.0, late_s=0.0) is None


def test_a_loop_that_is_far_behind_is_not_well() -> None:
    pulse = pulse_of()
    assert pulse.trouble(0.0, late_s=MAX_LATE_S - 0.1) is None
    assert pulse.trouble(9.0, late_s=7.25) == "the event loop is 7.2 s late"
