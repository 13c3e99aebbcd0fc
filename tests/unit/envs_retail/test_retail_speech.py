from __future__ import annotations

from collections.abc import Callable

import pytest

from sinkflex.envs import session
from sinkflex.envs.domains.retail import RetailDomain
from sinkflex.envs.domains.retail.script import report
from sinkflex.envs.domains.retail.speech import agrees, mentions_wish, opening_of, said_secrets
from sinkflex.envs.domains.retail.tasks import RetailTask, build_task, task_ids
from sinkflex.envs.tools import Side
from sinkflex.envs.users.scripted import ScriptedUser
from sinkflex.envs.world import World
from sinkflex.types import Message, Role, ToolCall

Picker = Callable[..., RetailTask]


def answer(task: RetailTask, text: str) -> Message:
    """Return what the task's user does on hearing one message first."""
    user = ScriptedUser(RetailDomain().script(task), seed="0")
    user.open()
    return user.act([Message(role=Role.ASSISTANT, content=text)]).message


def consent_after(task: RetailTask, proposal: str, reply: str) -> list[str]:
    domain = RetailDomain()
    world = domain.build_world(task)
    domain.observe(task, world, speaker=Side.AGENT, text=proposal)
    domain.observe(task, world, speaker=Side.USER, text=reply)
    return list(session.facts(world)["consent"])


def test_consent_is_what_was_asked_and_agreed_to(pick_task: Picker) -> None:
    wish = pick_task("refund").wishes[0]
    task = pick_task("refund")
    ask = f"Shall I refund item {wish.item_id}?"
    key = [f"refund {wish.item_id}"]
    assert consent_after(task, ask, "Yes, go ahead") == key
    assert consent_after(task, f"I will refund item {wish.item_id}. Do you confirm?", "yes") == key
    assert consent_after(task, ask, "no") == []
    assert consent_after(task, ask, "no, that is not right") == []
    assert consent_after(task, f"i refund item {wish.item_id}", "yes") == [], "it asked for nothing"
    assert consent_after(task, "shall i refund it?", "yes") == [], "it named nothing"
    assert consent_after(task, "shall i refund item 0000?", "yes") == [], "there is no such item"


def test_consent_covers_every_kind_of_change(pick_task: Picker) -> None:
    swap = pick_task("exchange")
    wish = swap.wishes[0]
    by_id = consent_after(swap, f"shall i exchange item {wish.item_id} for {wish.target}?", "yes")
    assert by_id == [f"exchange {wish.item_id} {wish.target}"]
    by_color = consent_after(swap, f"may i swap {wish.item_id} for a {wish.color} one?", "sure")
    assert by_color == [f"exchange {wish.item_id} {wish.color}"]
    move = pick_task("address")
    order, place = move.wishes[0].order_id, move.wishes[0].target
    assert consent_after(move, f"send order {order} to {place}?", "correct") == [f"address {order} {place}"]
    stop = pick_task("cancel").wishes[0].order_id
    assert consent_after(pick_task("cancel"), f"cancel order {stop}?", "yes") == [f"cancel {stop}"]


def test_consent_does_not_outlive_the_next_utterance(pick_task: Picker) -> None:
    task = pick_task("refund")
    domain, world = RetailDomain(), RetailDomain().build_world(task)
    item = task.wishes[0].item_id
    domain.observe(task, world, speaker=Side.AGENT, text=f"shall i refund item {item}?")
    domain.observe(task, world, speaker=Side.AGENT, text="one moment")
    domain.observe(task, world, speaker=Side.USER, text="yes")
    assert session.facts(world)["consent"] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("yes", True), ("ok, that is right", True), ("no", False), ("that is not right", False), ("maybe", False)],
)
def test_agreement(text: str, expected: bool) -> None:
    assert agrees(text) is expected


def test_identity_is_read_from_speech() -> None:
    assert said_secrets("my id is 4783, pin 2951") == {"said_id": "4783", "said_pin": "2951"}
    assert said_secrets("my name is ann and my zip is 2951") == {"said_name": "ann", "said_zip": "2951"}
    assert said_secrets("i have no idea, pin what?") == {}


def test_openings_tell_all_or_nothing() -> None:
    for task_id in task_ids("train", "medium")[:200]:
        for wish in build_task(task_id).wishes:
            for phrase in opening_of(wish):
                assert mentions_wish(phrase, wish) is not wish.form.vague


def test_the_user_says_yes_to_the_right_proposal_only(pick_task: Picker) -> None:
    task = pick_task("refund")
    item = task.wishes[0].item_id
    assert answer(task, f"Shall I refund item {item}?").content.startswith("yes")
    for wrong in (f"shall i refund item 1{item[1:]}?", f"shall i cancel order {item}?"):
        said = answer(task, wrong).content
        assert said.startswith("no, ")
        assert item in said, "it says what it wants instead"
    assert "number" in answer(task, "shall i refund it?").content


def test_the_user_tells_identity_when_asked(pick_task: Picker) -> None:
    by_id = pick_task("refund", knows_id=True)
    said = answer(by_id, "What is your customer id and pin?").content
    assert by_id.customer_id in said
    assert by_id.pin in said
    assert by_id.customer_name in answer(by_id, "what is your name?").content
    assert answer(by_id, "and your zip?").content == "i do not know my zip"
    by_zip = pick_task("refund", knows_id=False)
    assert answer(by_zip, "what is your id and pin?").content == "i only know name and zip"
    said = answer(by_zip, "what is your name and zip code?").content
    assert by_zip.customer_name in said
    assert by_zip.zip_code in said


def test_the_user_acts_on_the_device_only_as_told(pick_task: Picker) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    approve = ToolCall(name="approve_request", arguments={"request_id": wish.request_id})
    assert answer(task, f"please approve request {wish.request_id}").tool_calls == (approve,)
    assert answer(task, "please approve request 0000").tool_calls == (ToolCall(name="list_requests"),)
    assert answer(task, f"do not approve request {wish.request_id}").tool_calls == ()
    declining = pick_task("refund", twist="changes_mind", tier="medium")
    told = answer(declining, f"please approve request {declining.wishes[0].request_id}")
    assert told.tool_calls[0].name == "decline_request"
    assert answer(task, "i cannot do that").content in ("but i want it", "please try again")
    cancel = pick_task("cancel")
    check = ToolCall(name="check_order", arguments={"order_id": cancel.wishes[0].order_id})
    assert answer(cancel, f"order {cancel.wishes[0].order_id} is cancelled").tool_calls == (check,)
    late = pick_task("cancel", twist="too_late", tier="medium")
    check = ToolCall(name="check_order", arguments={"order_id": late.wishes[0].order_id})
    assert answer(late, "i can't cancel it, it is shipped").tool_calls == (check,)


def test_reports_say_what_the_device_showed(pick_task: Picker) -> None:
    task = pick_task("refund")
    wish = task.wishes[0]
    look = ToolCall(name="list_requests")
    seen = report(task, look, {wish.request_id: f"refund item {wish.item_id}"})
    assert wish.request_id in seen.phrases[0]
    assert not seen.stage_done
    assert report(task, look, {"0000": "refund item 0000"}).phrases[0] == "i did not ask for that"
    assert report(task, look, {}).phrases[0] == "i see no request"
    approve = ToolCall(name="approve_request", arguments={"request_id": "0000"})
    failed = report(task, approve, {"error": "there is no request 0000"})
    assert failed.phrases == ("it says there is no request 0000",)
    assert not failed.helpful
    assert report(task, approve, {"state": "approved", "request": "x"}).stage_done
    assert report(task, approve, {"state": "declined", "request": "x"}).stage_done
    cancel = pick_task("cancel")
    check = ToolCall(name="check_order", arguments={"order_id": cancel.wishes[0].order_id})
    pending = report(cancel, check, {"status": "pending", "address": "x"})
    assert not pending.stage_done
    assert "pending" in pending.phrases[0]
    assert report(cancel, check, {"status": "cancelled", "address": "x"}).stage_done


def test_the_players_brief_holds_what_the_script_knows(pick_task: Picker) -> None:
    domain = RetailDomain()
    for tier in domain.tiers:
        for task_id in task_ids("train", tier)[:60]:
            task = build_task(task_id)
            text = domain.user_prompt(task)
            assert (task.pin if task.knows_id else task.zip_code) in text
            for wish in task.wishes:
                assert wish.fallback in text
                assert ("change your mind" in text) == any(w.form.twist == "changes_mind" for w in task.wishes)
                assert ("at first you only say" in text) == any(w.form.vague for w in task.wishes)


def test_prompts() -> None:
    domain = RetailDomain()
    assert len(domain.system_prompt("brief")) < 250
    full = domain.system_prompt("full")
    for name in ("find_customer", "find_customer_by_zip", "get_order", "get_item", "find_swap", "transfer_to_human"):
        assert name in domain.agent_tools.tools
        assert f"`{name}`" in full


def test_a_made_up_breach_code_is_no_rule(pick_task: Picker) -> None:
    world: World = RetailDomain().build_world(pick_task("refund"))
    assert session.breaches(world) == ()
    assert set(RetailDomain.rules) == {"identify_first", "confirm_first", "hand_off_held_only"}
