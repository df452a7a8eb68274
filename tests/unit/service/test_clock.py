"""WallClockWatch: which changes of the wall clock are jumps."""

from doubles.fake_clock import FakeClock
from shoal_service.clock import WallClockWatch


class HeldUp(FakeClock):
    """A clock whose reader is interrupted before and after each reading of the wall clock."""

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
    assert watch.measure_jump_s() == 0.0
    clock.jump(-30.0)
    assert (watch.measure_jump_s(), watch.measure_jump_s()) == (-30.0, 0.0)


def test_small_steps_add_up() -> None:
    clock = FakeClock()
    watch = WallClockWatch(clock)
    jumps = []
    for _ in range(5):
        clock.jump(0.25)
        jumps.append(watch.measure_jump_s())
    assert jumps == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_busy_machine_is_not_a_jump() -> None:
    clock = HeldUp()
    watch = WallClockWatch(clock)
    clock.held_up_s = 5.0
    assert watch.measure_jump_s() == 0.0
    clock.held_up_s = 0.0
    assert watch.measure_jump_s() == 0.0
    clock.jump(7.0)
    assert watch.measure_jump_s() == 7.0
