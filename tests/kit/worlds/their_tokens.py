"""Lines with answers in every spelling, chat templates, and what transformers itself makes of them: tokens, and which
of them are answers'. Where transformers has no rule, each token that overlaps the answer is the answer's."""

import json
import re
from typing import Any

from kit.worlds.tokenizer_layouts import with_whole_offsets

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}{{ part['text'] }}"
    "{% endfor %}{% endif %}",
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}<OPEN>"
    "{{ m['content'] }}<|im_end|><CLOSE>{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = {
    "marked": ("{% generation %}", "{% endgeneration %}"),
    "marked, trimmed": ("{%- generation -%}", "{%- endgeneration -%}"),
    "marked, tight": ("{%generation%}", "{%endgeneration%}"),
    "marked, kept": ("{%+ generation %}", "{%+ endgeneration %}"),
}
TEMPLATES = {
    "plain": CHATML,
    "parts": PARTS,
    "a comment with a mark": "{# {% generation %} #}" + CHATML,
    "spaced": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|im_end|>\n{% else %}"
        "{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
    ),
    **{name: MARKED.replace("<OPEN>", opens).replace("<CLOSE>", ends) for name, (opens, ends) in MARKS.items()},
}
PAIRS = {
    "the border is a space": ("The sky is blue. Answer: ", "yes"),
    "the answer begins with a space": ("The sky is blue. Answer:", " yes it is 4."),
    "indentation": ("def f(x):\n", "    if x:\n        return x\n"),
    "indentation over the border": ("def f(x):\n  ", "  return x\n"),
    "no prompt": ("", "yes it is"),
    "two spaces": ("Answer:  ", "  no,  it is"),
    "letters of several bytes": ("naïve: ", "é ☃ 🙂"),
    "inside a word": ("The sky is ye", "llow."),
    "begins with the mark of a text": ("<|endoftext|>The sky ", "is blue"),
    "ends with the mark of a text": ("The sky ", "is blue<|im_end|>"),
    "ends with a space": ("Question: what is 2? ", "yes "),
    "only white space": ("Answer:", " \n "),
    "part of a letter": ("The e", "\u0301 is \u200d"),
    "a family over the border": ("👨\u200d", "👩\u200d👧"),
    "letters that become others": ("ﬁ ½", "İ ﬁ ｙｅｓ"),
    "a token that was added": ("Answer: ", "<tool>  yes it <tool> is"),
}
USER, ASSISTANT = ({"role": "user", "content": "what is 2 plus 2?"}, {"role": "assistant", "content": "yes it is 4."})
CODE = {"role": "assistant", "content": "def f(x):\n    return  x "}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2}}}]}
OTHER_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"y": "no"}}}]}


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "two turns": {"messages": [USER, ASSISTANT, USER, CODE]},
    "with a system prompt": {"messages": [{"role": "system", "content": "You are"}, USER, ASSISTANT]},
    "begins with the assistant": {"messages": [ASSISTANT, USER, CODE]},
    "the assistant twice": {"messages": [USER, ASSISTANT, CODE]},
    "prompt and completion": {"prompt": [USER, ASSISTANT, USER], "completion": [CODE]},
    "tools": {"messages": [USER, ASSISTANT], "tools": TOOLS},
    "tools as a text": {"messages": [USER, ASSISTANT], "tools": json.dumps(TOOLS)},
    "a call without content": {"messages": [USER, CALL, {"role": "tool", "content": "2"}, ASSISTANT]},
    "a call without the key": {"messages": [USER, {k: v for k, v in CALL.items() if v is not None}, USER, ASSISTANT]},
    "calls with other arguments": {"messages": [USER, CALL, {"role": "tool", "content": "2"}, OTHER_CALL]},
    "white space and letters of several bytes": {"messages": [USER, _says("  \n"), USER, _says(" 🙂"), _says("é ☃")]},
    "a list of one text": {"messages": [USER, {**ASSISTANT, "content": [{"type": "text", "text": "yes it is"}]}]},
    "lists of texts": {
        "messages": [{**USER, "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "is"}]}, CODE]
    },
}


def overlapping(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> list[tuple[int, bool]]:
    """Tokens of a text without its ends, and which of them have a character of a span."""
    encoding = with_whole_offsets(tokenizer).encode(text, add_special_tokens=False)
    answers = {at for begin, end in spans for at in range(begin, end)}
    pairs = zip(encoding.ids, encoding.offsets, strict=True)
    return [(token, not answers.isdisjoint(range(begin, end))) for token, (begin, end) in pairs]


def expected_pair(tokenizer: Any, prompt: str, completion: str) -> list[tuple[int, bool]]:
    """The tokens of transformers for the whole text, a mark that begins it once, and the end of a text behind it."""
    text, whole = prompt + completion, tokenizer(prompt + completion)["input_ids"]
    body = overlapping(tokenizer, text, [(len(prompt), len(text))])
    tokens = [token for token, _ in body]
    first = next(at for at in range(len(whole)) if whole[at : at + len(tokens)] == tokens)
    begin, end = whole[:first], whole[first + len(tokens) :]
    if tokens[: len(begin)] == begin:
        begin = []
    if tokenizer.eos_token_id not in (None, whole[-1]):
        end = [*end, tokenizer.eos_token_id]
    return [*((token, False) for token in begin), *body, *((token, True) for token in end)]


_TURN = re.compile(r"(?:<\|im_start\|>assistant\n|Answer:)(.*?<\|im_end\|>\n)", re.DOTALL)


def expected_conversation(tokenizer: Any, record: dict[str, Any], template: str) -> list[tuple[int, bool]]:
    tools = record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    prompt, messages = record.get("prompt", []), record.get("messages") or record["prompt"] + record["completion"]
    if template != "parts":
        messages = [
            {**one, "content": "".join(part["text"] for part in one["content"])}
            if isinstance(one.get("content"), list)
            else one
            for one in messages
        ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    asked = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) if prompt else ""
    spans = [turn.span(1) for turn in _TURN.finditer(text) if turn.start(1) >= len(asked)]
    if not template.startswith("marked"):
        theirs = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
        cells = overlapping(tokenizer, text, spans)
        assert [token for token, _ in cells] == theirs
        return cells
    marked = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    after = overlapping(tokenizer, text, [(len(asked), len(text))])
    return [
        (token, bool(mask) and is_after)
        for token, mask, (_, is_after) in zip(marked["input_ids"], marked["assistant_masks"], after, strict=True)
    ]
