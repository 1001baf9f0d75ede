"""Stream an answer from a server with OpenAI's client. Start `termgen serve` first."""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of the answer")
    parser.add_argument("question", nargs="?", default="What is a lighthouse for?")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key=options.api_key)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": options.question}],
        temperature=0.0,
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:  # the last chunk
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
