"""WallClockWatch: a jump of the wall clock, and what is none."""

from doubles.fake_clock import FakeClock
from shoal_service.clock import WallClockWatch


class HeldUp(FakeClock):
    """Whoever reads the wall clock may be held up by other processes before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.held_up_s = 0.0

    def time(self) -> float:
        self._now += self.held_up_s
        wall = super().time()
        self._now += self.held_up_s
        return wall


def test_a_jump_is_reported_once_with_its_size() -> None:
    clock = FakeClock()
    watch = WallClockWatch(clock)
    assert watch.jump_s() == 0.0
    clock.jump(-30.0)
    assert (watch.jump_s(), watch.jump_s()) == (-30.0, 0.0)


def test_small_steps_add_up() -> None:
    clock = FakeClock()
    watch = WallClockWatch(clock)
    found = []
    for _ in range(5):
        clock.jump(0.25)
        found.append(watch.jump_s())
    assert found == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_busy_machine_is_not_a_jump() -> None:
    clock = HeldUp()
    watch = WallClockWatch(clock)
    clock.held_up_s = 5.0
    assert watch.jump_s() == 0.0
    clock.held_up_s = 0.0
    assert watch.jump_s() == 0.0
    clock.jump(7.0)
    assert watch.jump_s() == 7.0
