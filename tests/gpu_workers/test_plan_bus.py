"""Plans and reports over real sockets: order, gaps, and the ends of processes."""

import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from gpu_workers.plan_bus import FollowerBus, GroupBroken, LeaderBus, Waiting
from gpu_workers.step_plan import DrawnToken, PullResult, Row, RowResult, StepPlan, StepResult
from ipc.curve import new_keys
from ipc.vocabulary import TokenLogprobs, WorkerName

ONE, OTHER = WorkerName("here", 0, 1), WorkerName("here", 1, 0)
PATIENCE_S = 10.0


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/plans.ipc"


@pytest.fixture
def leader(endpoint: str) -> Iterator[LeaderBus]:
    with closing(LeaderBus(endpoint, [ONE, OTHER])) as bus:
        yield bus


@pytest.fixture
def followers(endpoint: str, leader: LeaderBus) -> Iterator[list[FollowerBus]]:
    with closing(FollowerBus(endpoint, ONE)) as one, closing(FollowerBus(endpoint, OTHER)) as other:
        leader.gather(PATIENCE_S)
        yield [one, other]


def plans_of(bus: FollowerBus, count: int) -> list[StepPlan]:
    plans: list[StepPlan] = []
    while len(plans) < count:
        assert Waiting(bus.waitables)(PATIENCE_S)
        plans += bus.receive()
    return plans


def until_broken(bus: FollowerBus) -> str:
    try:
        while Waiting(bus.waitables)(PATIENCE_S):
            bus.receive()
    except GroupBroken as error:
        return str(error)
    raise AssertionError("it goes on")


def test_every_follower_gets_every_plan_in_order(
    leader: LeaderBus, followers: list[FollowerBus]
) -> None:
    sent = [
        StepPlan(
            step_id=i, drawn=(DrawnToken(i, 5),), rows=(Row(i, 1, True),), unmapped=(("p", i),)
        )
        for i in range(1, 40)
    ]
    for plan in sent:
        leader.send(plan)
    assert [plans_of(follower, len(sent)) for follower in followers] == [sent, sent]


def test_results_and_pulls_come_back(leader: LeaderBus, followers: list[FollowerBus]) -> None:
    row = RowResult(7, (3,), (TokenLogprobs(3, -0.5, ((3, -0.5),)),))
    result, pull = StepResult(4, (row,)), PullResult(9, 1024, 1.5, 2.5)
    followers[0].report(pull)
    followers[1].report(pull)
    followers[1].report(StepResult(3, ()))
    followers[1].report(result)
    assert leader.result(4, PATIENCE_S) == result
    assert leader.has_result(3)
    leader.result(3, PATIENCE_S)
    assert not leader.has_result(3)
    pulls = leader.take_pulls()
    while len(pulls) < 2:
        assert Waiting(leader.waitables)(PATIENCE_S)
        leader.drain()
        pulls += leader.take_pulls()
    assert pulls == [pull, pull]


def test_a_missing_plan_ends_the_follower(leader: LeaderBus, followers: list[FollowerBus]) -> None:
    leader.send(StepPlan(step_id=1))
    leader.send(StepPlan(step_id=3))
    assert until_broken(followers[0]) == "step 3 came where 2 was due"


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"P", b"{"], "the leader cannot be understood: Input data was truncated"),
        ([b"P", b'{"step_id": "x"}'], r"the leader cannot be understood: .* at `\$.step_id`"),
        ([b"P", b"\xff"], "the leader cannot be understood: "),
        ([b"?", b"{}"], "no leader says b'?'"),
        ([b"P"], "the leader cannot be understood: 1 frames where"),
        ([b"P", b"{}", b""], "the leader cannot be understood: 3 frames where"),
    ],
)
def test_garbage_on_the_plan_bus_ends_a_follower_by_one_sentence(
    endpoint: str, frames: list[bytes], why: str
) -> None:
    """It once was a traceback."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.bind(endpoint)
        with closing(FollowerBus(endpoint, ONE)) as follower:
            name, *_ = stranger.recv_multipart()
            stranger.send_multipart([name, *frames])
            assert re.search(why.replace("b'?'", r"b'\?'"), until_broken(follower))


@pytest.mark.parametrize("frames", [[b"S", b"{"], [b"U", b"[]"], [b"?", b""], [b"S"]])
def test_garbage_from_a_follower_ends_the_leader_by_a_sentence_that_names_it(
    endpoint: str, frames: list[bytes]
) -> None:
    with (
        closing(LeaderBus(endpoint, [ONE])) as leader,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as follower,
    ):
        follower.setsockopt(zmq.IDENTITY, str(ONE).encode())
        follower.connect(endpoint)
        follower.send_multipart(frames)
        with pytest.raises(GroupBroken, match=r"what came from here/0\.1 cannot be understood: "):
            leader.result(1, PATIENCE_S)


def test_a_follower_that_does_not_join_is_named(endpoint: str, leader: LeaderBus) -> None:
    with closing(FollowerBus(endpoint, ONE)), pytest.raises(GroupBroken) as broken:
        leader.gather(0.3)
    assert str(broken.value) == "here/1.0 did not join within 0.3 s"


def test_a_follower_may_come_before_its_leader(endpoint: str) -> None:
    with closing(FollowerBus(endpoint, ONE)), closing(LeaderBus(endpoint, [ONE])) as leader:
        leader.gather(PATIENCE_S)


def test_the_end_of_a_follower_is_seen_at_once(
    leader: LeaderBus, followers: list[FollowerBus]
) -> None:
    close_abruptly(followers[0])
    with pytest.raises(GroupBroken, match="a follower has ended"):
        leader.result(1, PATIENCE_S)


def test_the_end_of_the_leader_is_seen_at_once(
    leader: LeaderBus, followers: list[FollowerBus]
) -> None:
    close_abruptly(leader)
    assert until_broken(followers[0]) == "the leader has ended"


def test_a_dismissed_follower_reads_what_came_before_and_is_not_broken(
    leader: LeaderBus, followers: list[FollowerBus]
) -> None:
    leader.send(StepPlan(step_id=1))
    leader.dismiss()
    leader._socket.close(1000)
    plans = []
    while not followers[0].is_dismissed:
        assert Waiting(followers[0].waitables)(PATIENCE_S)
        plans += followers[0].receive()
    assert plans == [StepPlan(step_id=1)]
    assert followers[0].receive() == []


def test_a_result_that_never_comes_is_waited_for_within_a_bound(
    leader: LeaderBus, followers: list[FollowerBus]
) -> None:
    with pytest.raises(GroupBroken, match="no result of step 5"):
        leader.result(5, 0.05)


def close_abruptly(bus: LeaderBus | FollowerBus) -> None:
    """As a killed process would."""
    with suppress(zmq.ZMQError):
        bus._socket.close(0)


def tcp_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_between_nodes_plans_go_to_who_knows_the_leaders_key() -> None:
    endpoint, keys = tcp_endpoint(), new_keys()
    with (
        closing(LeaderBus(endpoint, [ONE], keys)) as leader,
        closing(FollowerBus(endpoint, ONE, keys.public)) as follower,
    ):
        leader.gather(PATIENCE_S)
        leader.send(StepPlan(step_id=1))
        assert plans_of(follower, 1) == [StepPlan(step_id=1)]
        follower.report(StepResult(1, ()))
        assert leader.result(1, PATIENCE_S) == StepResult(1, ())


def test_who_does_not_know_the_key_is_not_let_in_and_disturbs_nobody() -> None:
    endpoint, keys = tcp_endpoint(), new_keys()
    with closing(LeaderBus(endpoint, [ONE, OTHER], keys)) as leader:
        with (
            closing(FollowerBus(endpoint, ONE, keys.public)),
            closing(FollowerBus(endpoint, OTHER, new_keys().public)),
            pytest.raises(GroupBroken, match=r"^here/1\.0 did not join within 0\.5 s"),
        ):
            leader.gather(0.5)
        leader.drain()


def test_between_nodes_a_follower_sees_at_once_that_its_leader_has_ended() -> None:
    endpoint, keys = tcp_endpoint(), new_keys()
    with closing(LeaderBus(endpoint, [ONE], keys)) as leader:
        follower = FollowerBus(endpoint, ONE, keys.public)
        leader.gather(PATIENCE_S)
    with closing(follower):
        assert until_broken(follower) == "the leader has ended"


def test_a_bus_between_nodes_never_opens_without_keys() -> None:
    endpoint = tcp_endpoint()
    with pytest.raises(AssertionError, match="encrypted or not at all"):
        LeaderBus(endpoint, [ONE])
    with pytest.raises(AssertionError, match="encrypted or not at all"):
        FollowerBus(endpoint, ONE)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) != 0


def test_a_port_that_is_taken_ends_the_leader_with_a_word_C10() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(GroupBroken, match=f"cannot listen on {endpoint}: Address already"):
            LeaderBus(endpoint, [ONE], new_keys())
