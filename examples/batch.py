"""Complete many prompts at once: one call, one batch, results in the order of the prompts."""

import argparse
import time

from termgen import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The three primary colours are",
    "A haiku about rain:",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name of `termgen models`")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    options = parser.parse_args()

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    with LLM(options.model) as llm:
        began = time.perf_counter()
        outputs = llm.generate(options.prompts, params)
        seconds = time.perf_counter() - began

    for prompt, output in zip(options.prompts, outputs, strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
