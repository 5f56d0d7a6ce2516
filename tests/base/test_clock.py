from datetime import timedelta

from transom_hpc.base.clock import Clock, SystemClock


def test_the_system_clock_only_goes_forward_and_knows_the_zone() -> None:
    clock: Clock = SystemClock()
    before = clock.now()
    clock.sleep(0.01)
    assert clock.now() - before >= 0.01
    assert clock.wall().utcoffset() == timedelta(0)
