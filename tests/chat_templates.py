"""Chat templates in the manner of the families that use them, and conversations to render."""

CHATML = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{% for message in messages -%}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

INST = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'].strip() + eos_token }}
    {% else %}
        {{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}
"""

QWEN = """\
{%- set ns = namespace(last_query=-1, calls=[]) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_query %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {%- set arguments = call.function.arguments | tojson %}
        {{- '\\n<tool_call>\\n{"name": "%s", "arguments": %s}\\n</tool_call>' % (call.function.name, arguments) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GENERATION = """\
{% for message in messages %}
  {% if message.role == "assistant" %}
{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
  {% else %}
<{{ message.role }}>{{ message.content | replace("a", "4") | indent(2) }}
  {% endif %}
{% endfor %}
{{ dict(a=1, b=[1, 2.5, none, true]) | tojson(indent=2) }} {{ "{:>6.2f}|{}".format(3.14159, "x") }} {{ "%03d" % 7 }}
{{ messages | map(attribute="role") | join(",") }} {{ [3, 1, 2] | sort | last }} {{ "a,b".split(",") }} {{ 2 ** 5 * 3 }}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}\
{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n\\n' }}\
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}\
{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

TEMPLATES = {
    "deepseek": DEEPSEEK,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "inst": INST,
    "qwen": QWEN,
    "generation": GENERATION,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Größe <b> & 'quotes'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi there"}],
    "turns": [
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": '  <think>\nhm\n</think>\n\nHello <b>you</b> & "them"\n'},
        {"role": "user", "content": "Größe? 日本 😀\n\n  ok  "},
    ],
    "system": [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": ""}],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": "12 °C"},
    ],
    "twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
