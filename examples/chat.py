"""Chat with a model in this process: type, read, repeat. An empty line or Ctrl-D leaves."""

import argparse

from termgen import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name of `termgen models`")
    parser.add_argument("--max-tokens", type=int, default=256, help="length of an answer")
    options = parser.parse_args()

    params = SamplingParams(temperature=0.2, top_p=0.9, seed=0, max_tokens=options.max_tokens)
    messages = []
    with LLM(options.model) as llm:
        while question := read_line():
            messages.append({"role": "user", "content": question})
            # The conversation before the new question is in the prefix cache.
            output = llm.chat(messages, params)[0]
            answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(answer)
            print(f"[{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached]")


def read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
