"""Hold an answer to a JSON schema: tokens that would break it cannot be drawn."""

import argparse
import json

from termgen import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        # Limits matter: a small model may not find the end of a text by itself.
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "colour": {"enum": ["black", "ginger", "grey", "white"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 25},
    },
    "required": ["name", "colour", "age"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name of `termgen models`")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another cat")
    options = parser.parse_args()

    params = SamplingParams(
        temperature=0.7,
        seed=options.seed,
        max_tokens=120,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
    )
    question = "Invent a cat. Answer in JSON with its name, colour and age in years."
    with LLM(options.model) as llm:
        [output] = llm.chat([{"role": "user", "content": question}], params)

    text = output.outputs[0].text
    print(text)
    cat = json.loads(text)
    print(f"{cat['name']} is {cat['colour']} and {cat['age']} years old.")


if __name__ == "__main__":
    main()
