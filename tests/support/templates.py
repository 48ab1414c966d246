"""Small chat templates that do what released ones do, each in its own words."""

from __future__ import annotations

CHATML = "{% if tools %}{{ '<|im_start|>system\n' ~ tools | tojson ~ '<|im_end|>\n' }}{% endif %}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    "{{ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}{% endfor %}"
)
LAST_USER = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}"
)
LOOP = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
)
END = "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
UNTHOUGHT = "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
NO_THOUGHT = "{{ '<think>\n\n</think>\n\n' if add_generation_prompt and enable_thinking is false }}"

PLAIN = CHATML + LOOP + "{{ m.content }}" + CALLS + END + ASKED
# Reasoning in the last turn alone, empty where there is none; a prompt without thinking ends in an empty one.
QWEN3 = (
    CHATML + LAST_USER + LOOP + UNTHOUGHT + "{% if loop.index0 > last.user and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}{% endif %}{{ text }}" + CALLS + END + ASKED
) + NO_THOUGHT
# Every prompt opens reasoning, and no turn has any.
R1 = CHATML + LOOP + UNTHOUGHT + "{{ text }}" + CALLS + END + ASKED + "{{ '<think>\n' if add_generation_prompt }}"
# An empty system turn, and empty reasoning in every turn that has none.
THOUGHT = "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' "
NEMOTRON = (
    "{{ '<|im_start|>system\n' ~ (tools | tojson if tools) ~ '<|im_end|>\n' }}" + LAST_USER + LOOP + UNTHOUGHT + THOUGHT
    + "if m.reasoning_content and loop.index0 > last.user else '<think></think>' }}{{ text }}" + CALLS + END + ASKED
    + "{{ ('<think>\n' if enable_thinking else '<think></think>') if add_generation_prompt }}"
)  # fmt: skip
# The name of the next role ends a turn, so nothing ends the last one.
GLM = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
)
LFM = CHATML + LOOP + "{{ m.content }}" + END + ASKED  # tools, but no calls
# One call a turn; the last turn ends otherwise; reasoning, by another name, in the last turn alone.
GPT_OSS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% elif m.tool_calls %}"
    "{{ '<|start|>assistant to=' ~ m.tool_calls[0].function | tojson ~ '<|call|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' if loop.last and m.thinking }}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ ('<|return|>' if loop.last else '<|end|>') }}"
    "{% endif %}{% endfor %}{{ '<|start|>assistant' if add_generation_prompt }}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
)
# The prompt is a prefix of the conversation: nothing asks for an answer.
CALLED = "{{ '[TOOL_CALLS]' ~ m.tool_calls | map(attribute='function') | list | tojson ~ eos_token }}"
MISTRAL = (
    "{{ bos_token }}{{ tools | tojson if tools }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% elif m.tool_calls %}" + CALLED
    + "{% elif m.role == 'tool' %}{{ '[RESULT]' ~ m.content ~ '[/RESULT]' }}"
    "{% else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
)  # fmt: skip
# Llama 3.2: the date of today, and a call in the place of a text.
DATED = (
    "{{ tools | tojson if tools }}{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\n' }}"
    + LOOP
    + ("{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}" + END + ASKED)
)
# LLaDA2: roles in capitals between tags, and a system turn that always says whether to think at length.
LLADA2 = (
    "{{ '<role>SYSTEM</role>' ~ (messages[0].content ~ '\n' if messages[0].role == 'system') }}"
    "{{ tools | tojson ~ '\n' if tools }}{{ 'detailed thinking off<|role_end|>' }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<role>HUMAN</role>' ~ m.content ~ '<|role_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<role>OBSERVATION</role>' ~ m.content ~ '<|role_end|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<role>ASSISTANT</role>' ~ m.content }}" + CALLS
    + "{{ '<|role_end|>' }}{% endif %}{% endfor %}{{ '<role>ASSISTANT</role>' if add_generation_prompt }}"
)  # fmt: skip
TEMPLATES = {
    name.lower(): text
    for name, text in dict(
        PLAIN=PLAIN, QWEN3=QWEN3, R1=R1, NEMOTRON=NEMOTRON, GLM=GLM, LFM=LFM, GPT_OSS=GPT_OSS, PHI3=PHI3,
        MISTRAL=MISTRAL, DATED=DATED, LLADA2=LLADA2,
    ).items()
}  # fmt: skip
