"""Let a model call a Python function, through a server and OpenAI's client.

Start `termgen serve` first. The first call is required, so that a small model makes it; its name
and arguments are held to the schema. With --again the model may call until it answers.
"""

import argparse
import json
from pathlib import Path

from openai import OpenAI

MAX_TURNS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--again", action="store_true", help="for models above a billion weights")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()

    sizes = {path.name: path.stat().st_size for path in options.folder.iterdir() if path.is_file()}
    file = {"type": "string", "enum": sorted(sizes)}
    schema = {"type": "object", "properties": {"file": file}, "required": ["file"]}
    schema["additionalProperties"] = False
    function = {"name": "size_of", "description": "Bytes of a file.", "parameters": schema}
    tools = [{"type": "function", "function": {**function, "strict": True}}]

    client = OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": f"How large is the file {min(sizes)}?"}]
    for turn in range(MAX_TURNS):
        may_call = options.again and turn < MAX_TURNS - 1
        choice = "required" if turn == 0 else "auto" if may_call else "none"
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0.0,
            max_tokens=100,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            name = json.loads(call.function.arguments)["file"]
            print(f"{call.function.name}({name!r}) = {sizes[name]}")
            result = {"role": "tool", "tool_call_id": call.id, "content": f"{sizes[name]} bytes"}
            messages.append(result)


if __name__ == "__main__":
    main()
