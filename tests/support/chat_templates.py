"""Chat templates of the families in use, each written anew from the form of its prompts, and a tokenizer with its special tokens.

``call`` is how the family's model writes ``look_up(word="pear", times=2)``, None where its template writes no calls. ``results``
is what stands between that turn, ended by the model, and the next one if two tools say 84 and 85.
"""

from typing import NamedTuple

from tiny_tokenizers import tiny_tokenizer


class Family(NamedTuple):
    template: str
    call: str | None
    results: str
    end: str = "<|im_end|>"
    specials: tuple[str, ...] = ()


def _each(body):
    return "{% for m in messages %}" + body + "{% endfor %}"


def _chat_ml(assistant, tool, prompt="<|im_start|>assistant\n"):
    return (
        "{% if tools %}{{ '<|im_start|>system\nTools:' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
        + _each(
            "{% if m.role == 'assistant' %}" + assistant + "{% elif m.role == 'tool' %}" + tool + "{% else %}"
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        )
        + "{% if add_generation_prompt %}{{ '"
        + prompt
        + "' }}{% endif %}"
    )


_SAID = "{{ '<|im_start|>assistant\n' + m.content }}"
_GROUPED = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_GROUPED_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n84\n</tool_response>\n<tool_response>\n85\n</tool_response><|im_end|>\n"
)
_JSON = (
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' '
    "+ c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
)
_XML = (
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
)
_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"


def _llama(assistant, tool):
    head = "{{ '" + _HEAD.replace("{}", "' + m.role + '") + "' }}"
    return (
        "{% if tools %}{{ '" + _HEAD.format("system") + "' + tools | tojson + '<|eot_id|>' }}{% endif %}"
        + _each(
            "{% if m.tool_calls %}" + assistant + "{% elif m.role == 'tool' %}" + tool + "{% else %}" + head
            + "{{ m.content + '<|eot_id|>' }}{% endif %}"
        )
        + "{% if add_generation_prompt %}{{ '" + _HEAD.format("assistant") + "' }}{% endif %}"
    )  # fmt: skip


_LLAMA_SPECIALS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)

FAMILIES = {
    "SmolLM2": Family(
        _each("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}")
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        None,
        "\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>tool\n85<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen2.5": Family(
        _chat_ml(_SAID + _JSON, _GROUPED),
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "pear", "times": 2}}\n</tool_call>',
        _GROUPED_RESULTS + "<|im_start|>assistant\n",
    ),
    "Qwen3 (drops earlier thoughts)": Family(
        _chat_ml("{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1] }}" + _JSON, _GROUPED),
        '<think>\nA pear.\n</think>\n<tool_call>\n{"name": "look_up", "arguments": {"word": "pear", "times": 2}}\n</tool_call>',
        _GROUPED_RESULTS + "<|im_start|>assistant\n",
    ),
    "Qwen3.5 (opens a thought)": Family(
        _chat_ml(
            "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content }}" + _XML,
            _GROUPED,
            "<|im_start|>assistant\n<think>\n",
        ),
        "A pear.\n</think>\n\n<tool_call>\n<function=look_up>\n<parameter=word>\npear\n</parameter>\n<parameter=times>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        _GROUPED_RESULTS + "<|im_start|>assistant\n<think>\n",
    ),
    "Llama 3": Family(
        _llama("{{ '" + _HEAD.format("assistant") + "<|eot_id|>' }}", "{{ '" + _HEAD.format("tool") + "' + m.content + '<|eot_id|>' }}")
        .replace("{% if tools %}", "{% if false %}"),
        None,
        _HEAD.format("tool") + "84<|eot_id|>" + _HEAD.format("tool") + "85<|eot_id|>" + _HEAD.format("assistant"),
        "<|eot_id|>",
        _LLAMA_SPECIALS,
    ),
    "Llama 3.1": Family(
        _llama(
            "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% set c = m.tool_calls[0].function %}"
            "{{ '" + _HEAD.format("assistant") + "{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}<|eot_id|>' }}",
            "{{ '" + _HEAD.format("ipython") + "' + m.content | tojson + '<|eot_id|>' }}",
        ),
        '{"name": "look_up", "parameters": {"word": "pear", "times": 2}}',
        _HEAD.format("ipython") + '"84"<|eot_id|>' + _HEAD.format("ipython") + '"85"<|eot_id|>' + _HEAD.format("assistant"),
        "<|eot_id|>",
        _LLAMA_SPECIALS,
    ),
    "Gemma": Family(
        _each(
            "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}" + _ALTERNATE
            + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content + '<end_of_turn>\n' }}"
        )
        + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        None,
        "\n<start_of_turn>user\n84\n85<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "Phi-3 (leaves tools out)": Family(
        _each("{% if m.role in ['user', 'assistant'] %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}")
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        None,
        "\n<|user|>\n84\n85<|end|>\n<|assistant|>\n",
        "<|end|>",
        ("<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "Mistral": Family(
        _each(
            "{% if m.role == 'user' %}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
            "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
            "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
            "{% for c in m.tool_calls %}{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson "
            "+ '}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']</s>' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}"
        ),
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "pear", "times": 2}}]',
        "[TOOL_RESULTS]84[/TOOL_RESULTS][TOOL_RESULTS]85[/TOOL_RESULTS]",
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    "GLM (the next role ends a turn)": Family(
        "{% if tools %}{{ '<|system|>\n' + tools | tojson }}{% endif %}"
        + _each(
            "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
            "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}{{ '<|' + m.role + '|>\n' + m.content }}"
            "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
            "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
            "{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endif %}"
        )
        + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "\n<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>pear</arg_value>\n<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>",
        "\n<tool_response>\n84\n</tool_response>\n<tool_response>\n85\n</tool_response><|assistant|>",
        "<|observation|>",
        ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    ),
    "GPT-OSS (a result follows a call)": Family(
        "{% if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}"
        + _each(
            "{% if m.role == 'tool' %}{% if not messages[1].tool_calls %}{{ raise_exception('no call before') }}{% endif %}"
            "{{ '<|start|>functions.' + messages[1].tool_calls[0].function.name + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}"
            "{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}"
            "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' + c.arguments | tojson + '<|call|>' }}"
            "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + ('<|return|>' if m.role == 'assistant' and loop.last else '<|end|>') }}{% endif %}"
        )
        + "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "pear", "times": 2}',
        '<|start|>functions.look_up to=assistant<|message|>"84"<|end|><|start|>functions.look_up to=assistant<|message|>"85"<|end|>'
        "<|start|>assistant",
        "<|call|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
    "DeepSeek-V3 (arguments as text)": Family(
        _each(
            "{% if m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
            "{% elif m.tool_calls %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
            "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
            "{% endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
            "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% else %}{{ '<｜User｜>' + m.content }}{% endif %}"
        )
        + "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜>' }}{% endif %}",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"word": "pear", "times": 2}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁output▁begin｜>84<｜tool▁output▁end｜><｜tool▁output▁begin｜>85<｜tool▁output▁end｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    "LFM2.5 (calls of Python)": Family(
        _chat_ml(
            _SAID + "{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
            "{% for k, v in c.function.arguments.items() %}{{ k + '=' }}{% if v is string %}{{ \"'\" + v + \"'\" }}{% else %}{{ v }}{% endif %}"
            "{{ '' if loop.last else ', ' }}{% endfor %}{{ ')' if loop.last else '), ' }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}"
            "{{ '<|im_end|>\n' }}",
            "{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}",
        ),
        "<|tool_call_start|>[look_up(word='pear', times=2)]<|tool_call_end|>",
        "\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>tool\n85<|im_end|>\n<|im_start|>assistant\n",
        specials=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
}  # fmt: skip


def family_tokenizer(family):
    """A tokenizer with the family's template, whose end of text is that of its turns."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    tokenizer.eos_token = family.end
    tokenizer.chat_template = family.template
    return tokenizer
