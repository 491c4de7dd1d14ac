"""The real daemon under the real unit, sandbox and all, from start to stop."""

from tests.systemd.conftest import assert_nothing_is_left, complete, configure
from tests.systemd.lab import Lab

UNIT = "distserved.service"


def test_a_service_starts_answers_reloads_and_stops_with_nothing_left_D17(
    lab: Lab,
) -> None:
    configure(lab, "node")
    lab.systemctl("start", UNIT)  # returns when the daemon has said that it is ready
    assert lab.show(UNIT, "ActiveState") == "active"
    assert lab.show(UNIT, "StatusText").startswith(("ready: ", "degraded: "))
    assert complete(lab)["usage"]
    configure(lab, "node", log_level="debug", port=8001)
    lab.systemctl("reload", UNIT)
    lab.until_is(UNIT, "SubState", "running")
    lab.until_told(UNIT, "changed: log_level")
    lab.until_told(UNIT, "only a restart changes: port")
    complete(lab, prompt="the tale of Xanthippe")
    lab.until_told(UNIT, "POST /v1/completions", times=2)
    assert "Xanthippe" not in lab.log(UNIT)  # at no level
    lab.systemctl("stop", UNIT)
    assert lab.show(UNIT, "Result") == "success"
    assert_nothing_is_left(lab)
