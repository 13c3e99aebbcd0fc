from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sinkflex.chat.parsing import (
    MAX_ACTION_CHARS,
    MAX_TOOL_CALLS,
    ActionFormat,
    MalformedAction,
    ParsedAction,
    parse_action,
)
from sinkflex.types import ToolCall

GET_LINE = ToolCall(name="get_line", arguments={"line_id": "4783"})
GET_LINE_JSON = '{"name":"get_line","arguments":{"line_id":"4783"}}'
HARMONY_CALL = '<|channel|>commentary to=functions.get_line<|message|>{"line_id":"4783"}<|call|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARMONY_CALL, ParsedAction(tool_calls=(GET_LINE,))),
        (HARMONY_CALL.removesuffix("<|call|>"), ParsedAction(tool_calls=(GET_LINE,))),
        ("<|start|>assistant" + HARMONY_CALL, ParsedAction(tool_calls=(GET_LINE,))),
        (
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.get_line<|channel|>commentary "
            '<|constrain|>json<|message|>{"line_id":"4783"}<|call|>',
            ParsedAction(tool_calls=(GET_LINE,), reasoning="Look."),
        ),
        (
            ' to=functions.get_line<|channel|>commentary json<|message|>{"line_id":"4783"}',
            ParsedAction(tool_calls=(GET_LINE,)),
        ),
        (
            f"<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant{HARMONY_CALL}",
            ParsedAction(tool_calls=(GET_LINE,), reasoning="One moment."),
        ),
        (f"{HARMONY_CALL}<|start|>assistant{HARMONY_CALL}", ParsedAction(tool_calls=(GET_LINE, GET_LINE))),
        ("<|channel|>final<|message|> Hello \n<|return|>", ParsedAction(content="Hello")),
        ("<|channel|>final<|message|>Hello<|endoftext|>", ParsedAction(content="Hello")),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
            ParsedAction(content="Hello", reasoning="Hm"),
        ),
        (f"<tool_call>\n{GET_LINE_JSON}\n</tool_call><|im_end|>", ParsedAction(tool_calls=(GET_LINE,))),
        (
            f"<|im_start|>assistant\n<think>\nHm\n</think>\n\n<tool_call>{GET_LINE_JSON}</tool_call>\n"
            f"<tool_call>{GET_LINE_JSON}</tool_call>",
            ParsedAction(tool_calls=(GET_LINE, GET_LINE), reasoning="Hm"),
        ),
        ("Hm</think>Hello<|im_end|>", ParsedAction(content="Hello", reasoning="Hm")),
        ("<think>\n\n</think>\n\nHello", ParsedAction(content="Hello")),
        (GET_LINE_JSON, ParsedAction(tool_calls=(GET_LINE,))),
        (f" [{GET_LINE_JSON}, {GET_LINE_JSON}]<|im_end|>", ParsedAction(tool_calls=(GET_LINE, GET_LINE))),
        ('{"content":"Hello"}', ParsedAction(content="Hello")),
        ("  Hello, 2 < 3 {ok} <b>\t\n", ParsedAction(content="Hello, 2 < 3 {ok} <b>")),
        ("Hello</s>", ParsedAction(content="Hello")),
    ],
)
def test_well_formed_text_is_read_without_being_told_the_format(text: str, expected: ParsedAction) -> None:
    assert parse_action(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty; call a tool or write"),
        (" \n<|im_end|>", "is empty"),
        ("[]", "is empty"),
        ("{}", "is empty"),
        ('{"content":"  "}', "is empty"),
        ("<think>a</think>", "is empty"),
        ('{"name":"a","arguments":{', "is not valid JSON .* send complete, valid JSON"),
        (f"{GET_LINE_JSON} and more", "is not valid JSON .Extra data"),
        ('{"name":"a","name":"b","arguments":{}}', "repeats the key 'name'"),
        ('{"name":"a","arguments":{"x":NaN}}', "holds NaN, which is not JSON"),
        ('{"name":"a","arguments":{"x":-Infinity}}', "holds -Infinity, which is not JSON"),
        ('{"name":"a","arguments":{"x":1e999}}', "number too large"),
        ('{"name":"a","arguments":{"x":' + "9" * 5000 + "}}", "too many digits"),
        ('{"name":"a","arguments":{"x":"\\u0000"}}', "control character U.0000"),
        ('{"name":"a","arguments":{"\\ud800":1}}', "control character U.D800"),
        ('{"content":' + "[" * 33 + "]" * 33 + "}", "nested deeper than 32 levels"),
        ("[" * 50_000, "nested deeper than 32 levels"),
        ("[1]", "in the list is not a JSON object"),
        ('{"name":"a","arguments":[]}', '"arguments" are not a JSON object'),
        ('{"name":"a","arguments":"{}"}', '"arguments" are not a JSON object'),
        ('{"name":"a"}', "lacks 'arguments'"),
        ('{"arguments":{}}', "lacks 'name'"),
        ('{"name":"a","arguments":{},"id":"1"}', "unknown key 'id'"),
        ('{"name":"a b","arguments":{}}', "'a b' is not a tool name"),
        ('{"name":null,"arguments":{}}', "'None' is not a tool name"),
        ('{"content":1}', '"content" is not a string'),
        ("x\x07", "control character U.0007; send plain text"),
        ("x\ud800", "control character U.D800"),
        ("a" * (MAX_ACTION_CHARS + 1), f"has {MAX_ACTION_CHARS + 1} characters"),
        ("[" + ",".join([GET_LINE_JSON] * (MAX_TOOL_CALLS + 1)) + "]", f"makes {MAX_TOOL_CALLS + 1} calls"),
        (f"Sure. <tool_call>{GET_LINE_JSON}</tool_call>", "mixes a message to the user with tool calls"),
        (f"<tool_call>{GET_LINE_JSON}", "never closed; end it with </tool_call>"),
        (f"{GET_LINE_JSON}</tool_call>", "has no <tool_call> before it"),
        ("<tool_call>get_line(4783)</tool_call>", "inside <tool_call> is not valid JSON"),
        ("<think>Hm", "opens <think> and never closes it"),
        ("<think>a<think>b</think>c", "thinks more than once"),
        ("<think>a</think>b</think>c", "thinks more than once"),
        ("a<|im_end|>\n<|im_start|>user\nb", "goes on after its end"),
        ("<|start|>assistant", "ends inside a header"),
        ("<|channel|>final", "ends inside a header"),
        ("<|message|>Hello", "names no channel"),
        ("<|end|>", "<.end.> comes before <.message.>"),
        ("Hello<|return|>", "<.return.> comes before <.message.>"),
        ("<|channel|>finale<|message|>Hello", "'finale' is not a channel"),
        ("<|channel|><|message|>Hello", "'' is not a channel"),
        ("<|channel|>final now<|message|>Hello", "header holds 'now'"),
        ("user<|channel|>final<|message|>Hello", "header holds 'user'"),
        (" to=functions.a<|channel|>commentary to=functions.b<|message|>{}", "header holds 'to=functions.b'"),
        ("<|channel|>final to=functions.a<|message|>{}", "is on the final channel"),
        ("<|channel|>commentary to=python<|message|>{}", "recipient 'python' is no tool"),
        ("<|channel|>commentary to=functions.<|message|>{}", "'' is not a tool name"),
        ("<|channel|>commentary to=functions.a<|message|><|call|>", "is not valid JSON"),
        ("<|channel|>commentary to=functions.a<|message|>[1]<|call|>", '"arguments" are not a JSON object'),
        ("<|channel|>analysis<|message|>Hm<|end|>", "only thinks"),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "more than one final"),
        ("<|channel|>final<|message|>a<|message|>b", "body holds <.message.>"),
        ("<|channel|>final<|message|>a<|start|>assistant", "body holds <.start.>"),
        (f"<|channel|>final<|message|>a<|end|>{HARMONY_CALL}", "mixes a message to the user with tool calls"),
    ],
)
def test_malformed_text_says_why_in_one_sentence(text: str, reason: str) -> None:
    parsed = parse_action(text)
    assert isinstance(parsed, MalformedAction)
    assert re.search(reason, parsed.reason), parsed.reason
    assert parsed.reason[0].isupper() or parsed.reason[0] == "'" or parsed.reason.startswith("<|")
    assert parsed.reason.endswith(".")
    assert "\n" not in parsed.reason
    assert len(parsed.reason) < 200


@pytest.mark.parametrize(
    ("action_format", "text", "reason"),
    [
        (ActionFormat.HARMONY, "Hello", "has no channel; begin with"),
        (ActionFormat.HERMES, GET_LINE_JSON, "is bare JSON; write <tool_call>"),
        (ActionFormat.JSON, "Hello", "is not valid JSON"),
        (ActionFormat.JSON, "null", "is not a JSON object"),
    ],
)
def test_a_format_that_is_insisted_on_refuses_the_others(action_format: ActionFormat, text: str, reason: str) -> None:
    parsed = parse_action(text, action_format=action_format)
    assert isinstance(parsed, MalformedAction)
    assert reason in parsed.reason


def test_plain_takes_text_that_would_be_json_elsewhere() -> None:
    text = '{"id": 3} [1, 2] {"name": "Ann"}'
    assert parse_action(text, action_format=ActionFormat.PLAIN) == ParsedAction(content=text)


def test_plain_splits_thinking_off() -> None:
    parsed = parse_action("<think>secret</think>hi", action_format=ActionFormat.PLAIN)
    assert parsed == ParsedAction(content="hi", reasoning="secret")


@pytest.mark.parametrize(
    ("action_format", "text", "reason"),
    [
        (ActionFormat.PLAIN, GET_LINE_JSON, "holds a tool call"),
        (ActionFormat.PLAIN, HARMONY_CALL, "holds a control token"),
        (ActionFormat.AUTO, f"```json\n{GET_LINE_JSON}\n```", "holds a JSON block"),
        (ActionFormat.AUTO, f"I will look. {GET_LINE_JSON}", "holds a tool call"),
        (ActionFormat.AUTO, "I look {'name': 'a', 'arguments': {}}", "holds a tool call"),
        (ActionFormat.AUTO, f"<tool_call\n{GET_LINE_JSON}", "holds a part of a tool call"),
        (ActionFormat.AUTO, "<function=get_line><parameter=line_id>4783", "holds a part of a tool call"),
        (ActionFormat.AUTO, "hello<|im_end|> more", "holds a control token"),
        (ActionFormat.AUTO, '{"content":"<|pad|>"}', "holds a control token"),
        (ActionFormat.AUTO, "<|channel|>final<|message|><think>s</think>hi", "holds thinking"),
        (ActionFormat.AUTO, "<thinking>s</thinking>hi", "holds thinking"),
        (ActionFormat.AUTO, '{"content":"<thinking>s</thinking>hi"}', "holds thinking"),
    ],
)
def test_calls_tokens_and_thinking_never_reach_the_user(action_format: ActionFormat, text: str, reason: str) -> None:
    parsed = parse_action(text, action_format=action_format)
    assert isinstance(parsed, MalformedAction), parsed
    assert reason in parsed.reason
    assert parsed.reason.endswith(".")


@pytest.mark.parametrize("text", ["i think <b> so", "a <| b |> c | d", "my name: arguments", "``` code ```", '"name":'])
def test_odd_text_without_those_marks_stays_a_message(text: str) -> None:
    assert parse_action(text) == ParsedAction(content=text)


@pytest.mark.parametrize(
    "unit", ["<|", "<|a", "<think", "x<", "{'name'", '{"name"   ', "```jso", "<tool_cal", "'arguments' "]
)
def test_refusals_take_linear_time(unit: str) -> None:
    text = "a" + unit * ((MAX_ACTION_CHARS - 1) // len(unit))
    started = time.process_time()
    parse_action(text)
    assert time.process_time() - started < 0.5


_FRAGMENTS = st.sampled_from(
    [
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
        "assistant",
        "analysis",
        "commentary",
        "final",
        " to=functions.a",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|im_start|>",
        "<|im_end|>",
        '{"name":"a","arguments":{}}',
        '{"content":"x"}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ":",
        "\\u0000",
        "\ud800",
        "1e999",
        "NaN",
        " ",
        "\n",
        "hello",
    ]
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.lists(st.one_of(_FRAGMENTS, st.text(max_size=4)), max_size=14).map("".join),
    action_format=st.sampled_from(list(ActionFormat)),
)
def test_no_text_raises_and_every_action_is_sound(text: str, action_format: ActionFormat) -> None:
    parsed = parse_action(text, action_format=action_format)
    if isinstance(parsed, MalformedAction):
        assert parsed.reason.endswith(".")
        return
    assert bool(parsed.content) != bool(parsed.tool_calls)
    assert parsed.content == parsed.content.strip()
    for call in parsed.tool_calls:
        json.dumps(dict(call.arguments), allow_nan=False).encode()
    parsed.content.encode()
