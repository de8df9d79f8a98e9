"""Chat templates in the manner of well-known model families, written for these tests."""

LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|head|>system<|/head|>\n\n' }}
{%- if tools is not none %}{{ 'Environment: tools\n' }}{% endif %}
{{- 'Year: ' ~ date_string ~ '\n\n' ~ system ~ '<|eot|>' }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'ipython' or 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("only one tool call") }}{% endif %}
        {{- '<|head|>assistant<|/head|>\n\n' ~ message.tool_calls[0].function | tojson ~ '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' ~ message['role'] ~ '<|/head|>\n\n' ~ message['content'] | trim ~ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}
"""

MISTRAL = """
{%- set ns = namespace(index=0, system='') -%}
{%- for message in messages if message.role == 'system' -%}
    {%- set ns.system = ns.system ~ message.content ~ '\n\n' -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'user' -%}
        {%- if not loop.last or ns.index < 99 -%}{% set ns.index = ns.index + 1 %}{%- endif -%}
        [INST] {{ (ns.system if loop.last else '') ~ message['content'] }}[/INST]
    {%- elif message.role == 'assistant' -%}
        {{ ' ' ~ message.content ~ eos_token }}
    {%- else -%}
        {{ raise_exception('Only user and assistant roles are supported, not ' ~ message.role) }}
    {%- endif -%}
{%- endfor -%}
"""

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are a helpful assistant<|im_end|>
{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN2 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

QWEN3 = """{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GENERATION = """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
{% set inner = 'x' %}
{{ message.content + inner + eos_token }}
{% endgeneration %}
{{ inner is defined }}
{% else %}
{{ message.role | upper }}: {{ message.content }}
{% endif %}{% endfor %}"""

LOOPS = """{% for message in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.cycle('<', '>') }}
{% if loop.index > 3 %}{% break %}{% endif %}{{ message.content }}
{% endfor %}{{ dict(a=1, b=[2]) | tojson(separators=(',', ':')) }}
{{ dict.fromkeys('ab', 0) | tojson(sort_keys=true) }}"""

PARTS = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}
{% endif %}
{% endfor %}{{ image_token if image_token is defined }}{{ pad }}"""

MACROS = """{% macro turn(message, last) -%}
    [{{ message.role }}]{{ message.get('content', 'nothing') }}{{ caller() if caller }}{{ '' if last else ';' }}
{%- endmacro %}
{%- for message in messages %}{{ turn(message, loop.last) }}{% endfor %}
{{- messages | map(attribute='role') | unique | join(',') }}{{ documents | length if documents }}
{{- ' é <b> & "q" ' | tojson }}"""

UNDEFINED = "{{ messages[0].no_such_thing.at_all }}"
PLAIN_CONTENT = "{% for m in messages %}{{ m.content }}|{% endfor %}"
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"

ALL = {
    name: value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, str) and name != "ALL"
}
