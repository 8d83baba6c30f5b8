"""Muse Glimmer's way to write a conversation: its prompt, whom a message is for, and where an answer ends."""

import pytest

from tests.families.chat_tokenizers import byte_tokenizer
from turbospark_mlx.testing import tiny_config

SPECIAL = {
    "<|begin_of_text|>": 200000,
    "<|end_of_text|>": 200001,
    "<|start|>": 200005,
    "<|message|>": 200006,
    "<|eom|>": 200007,
    "<|eot|>": 200008,
    "<|video|>": 200091,
    "<|image|>": 200092,
}
TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- set strength = reasoning_effort if reasoning_effort is defined else 'high' %}
{{- '<|start|>system<|message|>Reasoning: ' + strength }}
{%- if tools %}{%- for tool in tools %}{{- '\\n' + tool.function.name }}{%- endfor %}{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.reasoning_content %}
{{- '<|start|>assistant to=self<|message|>' + message.reasoning_content + '<|eom|>' }}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=' + call.name + '<|message|><atem:function_calls>' + call.arguments | tojson }}
{{- '</atem:function_calls><|eot|>' }}
{%- else %}
{{- '<|start|>assistant to=user<|message|>' + message.content + '<|eot|>' }}
{%- endif %}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""In the manner of the published template, which is much longer."""
ASKED = [{"role": "user", "content": "Hi"}]


def make(*, generation=(200001, 200008)):
    config = tiny_config("muse")
    config["text_config"]["eos_token_id"] = 200001
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "add_bos_token": True}
    return byte_tokenizer(SPECIAL, TEMPLATE, config, named, generation)


@pytest.mark.parametrize("generation", [(200001, 200008), ()])
def test_the_end_of_a_turn_stops_and_that_of_a_message_does_not(generation):
    """Also where generation_config.json is missing: the template writes the mark that ends a turn."""
    assert make(generation=generation).eos_token_ids == {200001, 200008}


def test_a_prompt_has_one_bos_and_ends_in_a_header():
    tokenizer = make()
    ids = tokenizer.apply_chat_template(ASKED)
    assert ids[0] == 200000
    assert ids.count(200000) == 1
    text = tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert "Reasoning: high" in text
    assert text.endswith("<|start|>user<|message|>Hi<|eot|><|start|>assistant")
    assert tokenizer.decode(ids) == text
    assert "Reasoning: low" in tokenizer.apply_chat_template(ASKED, reasoning_effort="low", tokenize=False)
    assert tokenizer.encode("Hi")[0] == 200000


def test_messages_say_whom_they_are_for():
    messages = [
        *ASKED,
        {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
        },
        {"role": "clock", "content": "12:00"},
    ]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    text = make().apply_chat_template(messages, tools=tools, tokenize=False)
    assert "Reasoning: high\nclock<|eot|>" in text
    assert (
        "<|start|>assistant to=self<|message|>A greeting.<|eom|><|start|>assistant to=user<|message|>Hello.<|eot|>"
    ) in text
    assert '<|start|>assistant to=clock<|message|><atem:function_calls>{"zone": "UTC"}' in text
    assert text.endswith("<|start|>clock<|message|>12:00<|eot|><|start|>assistant")
