"""Renders every template of this folder with Transformers, for the test to compare with.

usage: python make_expected.py   (writes expected.json; made with transformers 5.17, Jinja2 3.1)
"""
import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get <b>weather</b> & more é",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city"},
                "days": {"type": "integer", "enum": [1, 2]},
                "units": {"type": "array", "items": {"type": "string"}},
                "scale": {"type": ["number", "null"], "default": 1.5},
            },
            "required": ["city"],
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


ARGUMENTS = {"city": "Paris", "f": 1.5, "tiny": 1e-7, "n": None, "l": [1, "x"], "o": {"a": True}, "e": {}}
RESULT = {"role": "tool", "content": '{"t": 20}', "tool_call_id": "abcdefghi", "name": "get_weather"}
PARTS = [{"type": "text", "text": "part one "}, {"type": "text", "text": " two"}]
CONVERSATIONS = [
    {"messages": [user("Hi <there> & 'you'\n")]},
    {"messages": [{"role": "system", "content": "Be brief.  "}, user("Hi"), assistant("Hello!")]},
    {"messages": [user("2+2?"), assistant("4"), user(" 3+3? "), assistant("<think>\nadd\n</think>\n\n6")]},
    {"messages": [user("2+2?"), assistant("4", reasoning_content="two", thinking="two"), user("and?"),
                  assistant("done", reasoning_content="x", thinking="x")]},
    {"messages": [{"role": "system", "content": "S"}, user("weather?")], "tools": [TOOL]},
    {"messages": [user("weather?"), assistant(None, tool_calls=[call(ARGUMENTS)]), RESULT, assistant("20")],
     "tools": [TOOL]},
    {"messages": [user("weather?"), assistant("", tool_calls=[call('{"city": "Paris"}')]), RESULT,
                  assistant("20"), user("thanks"), assistant("np")], "tools": [TOOL, TOOL]},
    {"messages": [user("a"), user("b")]},
    {"messages": [user(""), assistant("")]},
    {"messages": [user(PARTS), assistant("ok")]},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}


def render(source, conversation, prompt):
    """The text, or null where the template refuses."""
    try:
        return render_jinja_template(
            [conversation["messages"]], tools=conversation.get("tools"), chat_template=source,
            add_generation_prompt=prompt, **VARIABLES)[0][0]
    except Exception:
        return None


expected = {
    path.name: [[render(path.read_text(), c, prompt) for prompt in (False, True)] for c in CONVERSATIONS]
    for path in sorted(HERE.glob("*.jinja"))
}
document = {"variables": VARIABLES, "conversations": CONVERSATIONS, "expected": expected}
(HERE / "expected.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
